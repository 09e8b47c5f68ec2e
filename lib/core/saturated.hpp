// Sums and products of counts, which are not negative: where the result does not fit, it is the
// largest number, so that one comparison at the end finds every overflow on the way.
#pragma once

#include <cstdint>
#include <limits>

namespace fftune {

constexpr std::int64_t saturated_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max()
                                                : product;
}

constexpr std::int64_t saturated_sum(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<std::int64_t>::max() : sum;
}

}  // namespace fftune
