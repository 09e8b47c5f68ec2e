// The remote channel: connections between the processes of several hosts, over TCP.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "core/pending_connections.hpp"
#include "core/socket.hpp"
#include "tuning/protocol/line_channel.hpp"

namespace fftune {

/// Who connects, as the first line of a connection says.
struct Caller {
  std::unique_ptr<LineChannel> channel;
  std::string name;  // of the rank and the device
};

class Listener {
 public:
  /// On any free port of all addresses. Throws Error(unavailable).
  Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  /// The addresses, the port, and a word that callers must know: "10.0.0.1,127.0.0.1 4711 8f3a...",
  /// for connect_to().
  const std::string& invitation() const { return invitation_; }
  /// The next caller that knows the word, if one comes within `seconds`. Others are not answered,
  /// and hold nobody up.
  std::optional<Caller> accept(double seconds);

 private:
  Socket socket_;
  std::string word_;
  std::string invitation_;
  PendingConnections pending_;
};

/// Throws Error(unavailable) if no address of the invitation answers.
std::unique_ptr<LineChannel> connect_to(const std::string& invitation, const std::string& name);

}  // namespace fftune
