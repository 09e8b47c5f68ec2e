#include "tuning/remote/remote_channel.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <sstream>

#include "core/error.hpp"

namespace fftune {
namespace {

using Clock = std::chrono::steady_clock;

/// A caller that does not say who it is in this time is none.
constexpr int introduction_seconds = 5;

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorKind::unavailable,
              fmt::format("the ranks cannot be connected: {}: {}", what, std::strerror(errno)));
}

/// A host that is gone without a word is noticed within a minute.
void keep_alive(int descriptor) {
  const int on = 1, idle = 20, each = 10, times = 4;
  ::setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  ::setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, &each, sizeof each);
  ::setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
  ::setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/// Addresses of this host; those that only the host itself can reach come last.
std::string own_addresses() {
  std::string all;
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) == 0) {
    for (const auto* each = first; each; each = each->ifa_next) {
      if (!each->ifa_addr || each->ifa_addr->sa_family != AF_INET) continue;
      sockaddr_in address;
      std::memcpy(&address, each->ifa_addr, sizeof address);
      char text[INET_ADDRSTRLEN];
      if (!::inet_ntop(AF_INET, &address.sin_addr, text, sizeof text)) continue;
      if (std::string(text) != "127.0.0.1") all += std::string(text) + ",";
    }
    ::freeifaddrs(first);
  }
  return all + "127.0.0.1";
}

std::string random_word() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
}

/// A caller's first line is the word, a space and its name.
Introduction introduction_of(std::string_view bytes, const std::string& word) {
  const std::string start = word + " ";
  if (bytes.substr(0, start.size()) != std::string_view(start).substr(0, bytes.size()))
    return Introduction::refused;
  return bytes.find('\n') == bytes.npos ? Introduction::incomplete : Introduction::accepted;
}

}  // namespace

Listener::Listener()
    : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)),
      word_(random_word()),
      pending_(socket_.get(),
               {.judge = [this](std::string_view bytes) { return introduction_of(bytes, word_); },
                .patience = std::chrono::seconds(introduction_seconds)}) {
  if (!socket_) fail("a socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t size = sizeof address;
  if (::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(socket_.get(), 4096) != 0 ||
      ::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0)
    fail("a port");
  invitation_ = fmt::format("{} {} {}", own_addresses(), ntohs(address.sin_port), word_);
}

std::optional<Caller> Listener::accept(double seconds) {
  auto caller = pending_.next(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                 std::chrono::duration<double>(seconds)));
  if (!caller) return {};
  const auto end = caller->bytes.find('\n');
  const std::string name = caller->bytes.substr(word_.size() + 1, end - word_.size() - 1);
  keep_alive(caller->socket.get());
  return Caller{
      std::make_unique<LineChannel>(caller->socket.release(), caller->bytes.substr(end + 1)), name};
}

std::unique_ptr<LineChannel> connect_to(const std::string& invitation, const std::string& name) {
  std::istringstream words(invitation);
  std::string addresses, word;
  std::uint16_t port = 0;
  words >> addresses >> port >> word;
  std::istringstream each(addresses);
  for (std::string text; std::getline(each, text, ',');) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    if (::inet_pton(AF_INET, text.c_str(), &address.sin_addr) != 1) continue;
    const int descriptor = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (descriptor < 0) fail("a socket");
    // An address of another network may never answer.
    const timeval patience{introduction_seconds, 0};
    ::setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (::connect(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
      keep_alive(descriptor);
      const timeval none{};  // rank 0 may be stopped for longer
      ::setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &none, sizeof none);
      auto channel = std::make_unique<LineChannel>(descriptor);
      if (channel->send(word + " " + name)) return channel;
    } else {
      ::close(descriptor);
    }
  }
  fail("rank 0 is not reached at " + addresses);
}

}  // namespace fftune
