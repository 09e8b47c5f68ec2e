#include "support/strangers.hpp"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <utility>

namespace fftune::testing {

int connect_to_port(std::uint16_t port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const timeval patience{1, 0};
  ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0)
    return socket;
  ::close(socket);
  return -1;
}

namespace {

int bytes_of(int socket) {
  std::array<char, 256> bytes;
  const auto count = ::recv(socket, bytes.data(), bytes.size(), MSG_DONTWAIT);
  return count > 0 ? static_cast<int>(count) : 0;
}

}  // namespace

Strangers::Strangers(std::uint16_t port, std::vector<std::string> texts, std::string slow,
                     int silent)
    : port_(port),
      texts_(std::move(texts)),
      slow_(std::move(slow)),
      many_([this] { connect_again_and_again(); }),
      silent_([this, silent] { stay(silent); }) {}

Strangers::~Strangers() {
  end_ = true;
  many_.join();
  silent_.join();
}

void Strangers::wait_until_there() const {
  while (!stay_ || connections_ < 100) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void Strangers::connect_again_and_again() {
  for (std::size_t i = 0; !end_; ++i) {
    const int socket = connect_to_port(port_);
    if (socket < 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    const std::string& text = texts_[i % texts_.size()];
    ::send(socket, text.data(), text.size(), MSG_NOSIGNAL);
    // Every third one resets the connection.
    const linger reset{1, 0};
    if (i % 3 == 0) ::setsockopt(socket, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    answered_ += bytes_of(socket);
    ::close(socket);
    ++connections_;
  }
}

void Strangers::stay(int silent) {
  std::vector<int> sockets;
  while (!end_ && sockets.size() < static_cast<std::size_t>(silent))
    if (const int socket = connect_to_port(port_); socket >= 0)
      sockets.push_back(socket);
    else
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  stay_ = true;
  for (std::size_t at = 0; !end_; ++at) {
    for (std::size_t i = 0; i < sockets.size(); i += 2)
      if (at < slow_.size()) ::send(sockets[i], &slow_[at], 1, MSG_NOSIGNAL);
    for (const int socket : sockets) answered_ += bytes_of(socket);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  for (const int socket : sockets) ::close(socket);
}

}  // namespace fftune::testing
