// How long a worker may be silent before it is killed.
#pragma once

#include <algorithm>

namespace fftune {

/// A launch may take 50 times what is expected of it, at least 5 s (a busy machine can stall a
/// process that long) and at most 2 minutes, unless three times the expected is longer still. The
/// expected time of a sample is what the passes before took; of a verification or a first pass,
/// what making ready for the problem took, as that computes the reference and verifies a whole
/// recipe. What is not a launch has a limit of its own.
struct Watchdog {
  double multiple = 50;
  double least_seconds = 5;
  double most_seconds = 120;
  double compile_seconds = 300;  // for one kernel
  double setup_seconds = 900;    // opening the device, measuring its ceilings, making ready

  /// `expected_seconds` 0: unknown.
  double allowed(double expected_seconds) const {
    if (!(expected_seconds > 0)) return most_seconds;
    const double bounded = std::clamp(multiple * expected_seconds, least_seconds, most_seconds);
    return std::max(bounded, 3 * expected_seconds);
  }
};

}  // namespace fftune
