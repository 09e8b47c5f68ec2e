// A draw of test data whose values are noise. Timing inputs need a part of them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

namespace fftune {

/// A TensorSpec::draw. From element `from` on its values are noise in units of `unit` elements.
/// Whole units may repeat, and it fills a shorter span of them too. Packed weights are gigabytes:
/// inputs to be timed draw some units and repeat them.
struct NoiseDraw {
  std::function<void(std::uint64_t seed, std::span<double> values)> fill;
  std::int64_t unit = 1, from = 0;

  void operator()(std::uint64_t seed, std::span<double> values) const { fill(seed, values); }
};

}  // namespace fftune
