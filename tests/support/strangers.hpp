// Processes that connect to a port of this host and are nobody's: silent, slow, chatty, and many.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace fftune::testing {

/// A connection to the port on this host, or -1.
int connect_to_port(std::uint16_t port);

/// From when somebody listens until it is destroyed: connections that say nothing, ones that send
/// `slow` a byte at a time, and an endless row of others that send each of `texts` and leave.
class Strangers {
 public:
  Strangers(std::uint16_t port, std::vector<std::string> texts, std::string slow, int silent = 300);
  ~Strangers();
  Strangers(const Strangers&) = delete;
  Strangers& operator=(const Strangers&) = delete;

  /// Until the silent ones and the first hundred others were there.
  void wait_until_there() const;
  int connections() const { return connections_; }
  /// Bytes that any of them was sent.
  int answered() const { return answered_; }

 private:
  void connect_again_and_again();
  void stay(int silent);

  std::uint16_t port_;
  std::vector<std::string> texts_;
  std::string slow_;
  std::atomic<bool> end_{false}, stay_{false};
  std::atomic<int> connections_{0}, answered_{0};
  std::thread many_, silent_;
};

}  // namespace fftune::testing
