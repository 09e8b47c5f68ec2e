// Ctrl-C and the like: the first asks for an end, a second ends the process at once.
#pragma once

#include <atomic>

namespace fftune::tool {

/// From construction to destruction SIGINT, SIGTERM and SIGHUP (unless it is ignored, as under
/// nohup) set requested(); a SIGINT after that, or any of them a second later, exits with 130
/// on the spot. A closed pipe is an error of the write to it alone. One at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  const std::atomic<bool>& requested() const;

 private:
  bool hangups_count_;
};

}  // namespace fftune::tool
