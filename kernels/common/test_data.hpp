// Test data of tensors that hold no noise (TensorSpec::draw).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <vector>

namespace fftune {

using DrawValues = std::function<void(std::uint64_t seed, std::span<double> values)>;

/// Each value is drawn by itself from a generator.
template <typename Value>
DrawValues each(Value value) {
  return [value](std::uint64_t seed, std::span<double> values) {
    std::mt19937_64 random(seed);
    for (double& one : values) one = value(random);
  };
}

/// From 0 to 1.
inline double uniform(std::mt19937_64& random) {
  return static_cast<double>(random() >> 11) / 0x1p53;
}

/// Whole numbers from `least` to `most`, each as likely.
inline DrawValues whole_numbers(std::int64_t least, std::int64_t most) {
  return each([=](std::mt19937_64& random) {
    const std::uint64_t above = random() % static_cast<std::uint64_t>(most - least + 1);
    return static_cast<double>(least + static_cast<std::int64_t>(above));
  });
}

/// The whole numbers from `first` to `end` - 1 in some order; none if there are none.
inline std::vector<double> shuffled(std::int64_t first, std::int64_t end, std::mt19937_64& random) {
  std::vector<double> order(static_cast<std::size_t>(std::max<std::int64_t>(0, end - first)));
  std::iota(order.begin(), order.end(), static_cast<double>(first));
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

}  // namespace fftune
