// Connections of a listening socket whose other ends have not shown yet who they are. They are read
// side by side, so that a stranger that is silent, slow or one of thousands holds nobody up.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <list>
#include <optional>
#include <string>
#include <string_view>

#include "core/file_access.hpp"
#include "core/socket.hpp"

namespace fftune {

/// Receives up to `most` bytes and, over a local socket, the descriptor that comes with them.
/// Returns what recvmsg() does.
ssize_t receive_attached(const Socket& socket, void* to, std::size_t most, int flags,
                         FileDescriptor& attached);

/// The verdict on the first bytes of a connection.
enum class Introduction {
  incomplete,  // more may come
  accepted,
  refused,
};

struct PendingOptions {
  /// Judges all bytes that came so far: 1 to most_bytes. The first that are accepted may have
  /// others behind them.
  std::function<Introduction(std::string_view bytes)> judge;
  std::size_t most_bytes = 4096;  // of an introduction, and read at once
  /// Whether a connection is read at all.
  std::function<bool(int descriptor)> admits = [](int) { return true; };
  std::chrono::milliseconds patience{5000};  // with each connection
  /// Connections at once. The oldest one makes room for a new one.
  std::size_t most = 256;
};

class PendingConnections {
 public:
  /// `listener` listens, and outlives this. It no longer blocks.
  PendingConnections(int listener, PendingOptions options);

  struct Introduced {
    Socket socket;            // which blocks
    std::string bytes;        // all that was read
    FileDescriptor attached;  // that came with them over a local socket, or none
  };
  /// The next one whose introduction is accepted; nothing at the deadline. The others are closed
  /// without an answer. Throws Error(unavailable) with the reason alone where the process has no
  /// descriptor for a connection.
  std::optional<Introduced> next(std::chrono::steady_clock::time_point deadline);

 private:
  struct Pending {
    Introduced from;
    std::chrono::steady_clock::time_point until;
  };
  void wait(std::chrono::steady_clock::time_point deadline);
  void take_new();
  Introduction read(Introduced& from) const;

  int listener_;
  PendingOptions options_;
  std::list<Pending> pending_;  // the oldest first
};

}  // namespace fftune
