// A matrix product as the GEMM engines see it, whatever op it belongs to.
#pragma once

#include <cstdint>

namespace fftune {

/// c [m,n] = epilogue(a [m,k] · b1 [n,k]ᵀ[, a · b2 [n,k]ᵀ]), row-major, so k is contiguous in both
/// operands.
struct GemmShape {
  std::int64_t m = 1;
  std::int64_t n = 1;
  std::int64_t k = 1;
  int products = 1;  // how many b there are
};

constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

}  // namespace fftune
