// Ctrl-C: the first asks for an end, the second ends the process at once.
#pragma once

#include <atomic>

namespace fftune::tool {

/// From construction to destruction SIGINT and SIGTERM set requested(); a second one exits with
/// 130 on the spot. One at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  const std::atomic<bool>& requested() const;
};

}  // namespace fftune::tool
