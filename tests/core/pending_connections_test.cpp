#include "core/pending_connections.hpp"

#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <filesystem>
#include <iterator>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "support/catch.hpp"
#include "support/strangers.hpp"

using namespace fftune;
using namespace std::chrono_literals;
using testing::connect_to_port;

namespace {

using Clock = std::chrono::steady_clock;

/// A listening port, where who sends "let me in" is accepted.
struct Port {
  Port() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof address;
    REQUIRE(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), bytes) == 0);
    REQUIRE(::listen(listener.get(), 100) == 0);
    ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &bytes);
    number = ntohs(address.sin_port);
  }
  PendingOptions options() const {
    PendingOptions options;
    options.judge = [](std::string_view bytes) {
      const std::string_view words = "let me in";
      if (bytes == words) return Introduction::accepted;
      return words.starts_with(bytes) ? Introduction::incomplete : Introduction::refused;
    };
    return options;
  }
  /// A connection that has sent the text.
  Socket connect(std::string_view text) const {
    Socket socket(connect_to_port(number));
    REQUIRE(::send(socket.get(), text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
    return socket;
  }

  Socket listener = Socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  std::uint16_t number = 0;
};

/// Whether the other end closed the connection, within two seconds.
bool is_closed(const Socket& socket) {
  const timeval patience{2, 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  char byte = 0;
  const auto count = ::recv(socket.get(), &byte, 1, 0);
  return count == 0 || (count < 0 && errno == ECONNRESET);
}

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

}  // namespace

TEST_CASE("a connection is heard in pieces while others are silent") {
  const Port port;
  PendingConnections pending(port.listener.get(), port.options());
  const Socket silent = port.connect(""), half = port.connect("let me ");
  CHECK_FALSE(pending.next(Clock::now() + 50ms));
  const Socket whole = port.connect("let me in");
  auto first = pending.next(Clock::now() + 10s);
  REQUIRE(first);
  REQUIRE(::send(half.get(), "in", 2, 0) == 2);
  REQUIRE(pending.next(Clock::now() + 10s));
  // The connection that is handed out answers and blocks like any other.
  CHECK(::send(first->socket.get(), "yes", 3, 0) == 3);
  char answer[3];
  CHECK(::recv(whole.get(), answer, 3, MSG_WAITALL) == 3);
}

TEST_CASE("each connection has its own time, and refused ones are closed at once") {
  const Port port;
  auto options = port.options();
  options.patience = 300ms;
  PendingConnections pending(port.listener.get(), options);
  const Socket silent = port.connect(""), wrong = port.connect("let you in");
  const auto begin = Clock::now();
  CHECK_FALSE(pending.next(begin + 100ms));
  CHECK(is_closed(wrong));
  // A byte now and then gains nothing.
  std::thread slow([&] {
    const Socket socket(connect_to_port(port.number));
    for (const char byte : std::string("let me in")) {
      ::send(socket.get(), &byte, 1, MSG_NOSIGNAL);
      std::this_thread::sleep_for(100ms);
    }
  });
  CHECK_FALSE(pending.next(begin + 1500ms));
  slow.join();
  CHECK(is_closed(silent));
}

TEST_CASE("a bounded number of connections waits, and the oldest makes room for one that speaks") {
  const Port port;
  auto options = port.options();
  options.most = 4;
  PendingConnections pending(port.listener.get(), options);
  std::vector<Socket> silent;
  for (int i = 0; i < 50; ++i) silent.push_back(port.connect(""));
  const std::size_t before = open_descriptors();
  CHECK_FALSE(pending.next(Clock::now() + 200ms));
  CHECK(open_descriptors() <= before + 4);
  const Socket whole = port.connect("let me in");
  CHECK(pending.next(Clock::now() + 10s));
  CHECK(is_closed(silent.front()));
}

TEST_CASE("connections that say nothing do not use up the descriptors of the process") {
#ifdef __SANITIZE_ADDRESS__  // its checks of objects open a pipe, and fail without one
  FFTUNE_SKIP("a sanitizer needs descriptors of its own");
#endif
  const Port port;
  PendingConnections pending(port.listener.get(), port.options());
  std::vector<Socket> silent;
  for (int i = 0; i < 20; ++i) silent.push_back(port.connect(""));
  const Socket whole = port.connect("let me in");
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const int next = ::dup(0);
  ::close(next);
  const rlimit few{static_cast<rlim_t>(next) + 3, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  std::string error;
  bool found = false;
  try {
    found = pending.next(Clock::now() + 10s).has_value();
  } catch (const Error& thrown) {
    error = thrown.what();
  }
  ::setrlimit(RLIMIT_NOFILE, &before);
  CHECK(error == "");
  CHECK(found);
}
