// The messages of a group's ranks as it forms and ends, and the addresses of their sockets.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/pending_connections.hpp"
#include "core/socket.hpp"
#include "runtime/group.hpp"

namespace fftune::group_messages {

using Clock = std::chrono::steady_clock;

inline constexpr std::uint64_t protocol = 0x36304f5254554646;  // "FFUTRO06"
/// All but the number, which tells a rank of another version from a stranger.
inline constexpr std::uint64_t protocol_name = ~std::uint64_t{0} >> 16;

enum class Kind : std::uint32_t { hello, ready, go, failure, gone, value };

/// All that ranks tell each other, one packet each. Every version's begins like this one's.
struct Message {
  std::uint64_t version = protocol;
  std::array<char, 128> group = {};  // the name of the rank's group
  Kind kind = Kind::hello;
  std::int32_t rank = 0, ranks = 0;
  std::uint32_t device_kind = 0;
  std::uint64_t max_bytes = 0;
  std::uint64_t process = 0, key = 0;
  std::array<std::byte, 64> handle = {};
  std::array<char, 32> device = {};
  std::array<char, 32> library = {};  // its version
  std::uint32_t fault = 0;            // of `gone`
  std::array<char, 400> text = {};    // of `failure`
  double value = 0;                   // of `value`
  std::uint32_t nccl = 0;             // whether the rank wants a communicator
  CommunicatorOptions::Id id = {};    // its name, from rank 0
};

struct Received {
  Message message;
  int descriptor = -1;         // of shared memory, or none
  bool other_version = false;  // a rank, but of a library whose messages are others
};

std::string reason();

inline constexpr std::string_view tcp_scheme = "tcp://";

/// Connections that the kernel keeps until rank 0 takes them, strangers among them.
inline constexpr int most_waiting = 4096;

/// Address of a socket in the abstract namespace, or of its file: a name that begins with a slash;
/// or of a port, from "tcp://host:port/word".
struct Address {
  explicit Address(const std::string& name);
  const char* path() const;
  Socket open() const;
  /// A connection over a network: a host that is gone is known within 20 s, packets go at once, and
  /// nothing that is half sent is waited for. (Local sockets end with their process.)
  static void watch_line(int socket);
  /// A socket's file that a process left which is gone; false: there is none such. Another file
  /// refuses connections too, and stays.
  bool remove_left() const;
  void remove() const;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&value); }
  bool is_file, is_tcp;
  sockaddr_storage value = {};
  socklen_t bytes = 0;

 private:
  void find(const std::string& name);
};

/// Until `deadline`; false: not in time.
bool wait_readable(int descriptor, Clock::time_point deadline);
/// False: the other end is gone. Never raises SIGPIPE and never blocks for long: packets are small.
bool send_message(const Socket& socket, const Message& message, int descriptor = -1);
/// Nothing: the `bytes` that came are no rank's. Takes the descriptor that came with them.
std::optional<Received> received_as(Message message, std::size_t bytes, FileDescriptor attached);
/// Nothing: the other end is gone, or is no rank.
std::optional<Received> receive_message(const Socket& socket);
/// Whether the process at the other end is of this user, where the socket tells.
bool is_own_user(const Address& address, int socket);
[[noreturn]] void refuse(const std::string& why);
/// As where the process has too many open files.
std::string cannot_meet(const std::string& name, const std::string& why);
/// Judges the first bytes of a connection to rank 0. The word in the name of a group that goes over
/// a network is its secret: who does not know it is a stranger, whatever else it says.
Introduction introduction_of(std::string_view bytes, const Address& address,
                             const std::string& name);

}  // namespace fftune::group_messages
