// How the threads of a CUDA kernel share the rows of a matrix: what the memory-bound families have
// in common.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/facts.hpp"

namespace fftune {

constexpr std::int64_t quotient_up(std::int64_t value, std::int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

/// The widest access, in bytes, that every row of `row_bytes` is aligned to: 16 at most.
constexpr std::int64_t widest_vector(std::int64_t row_bytes) {
  return std::min<std::int64_t>(16, row_bytes & -row_bytes);
}

/// The least power of two that is not below `value`.
constexpr std::int64_t power_of_two(std::int64_t value) {
  std::int64_t power = 1;
  while (power < value) power *= 2;
  return power;
}

/// 32-bit registers that elements of `bytes` take as they came from memory: two a register where
/// two came together.
constexpr std::int64_t raw_registers(std::int64_t elements, std::int64_t bytes,
                                     std::int64_t elements_of_vector) {
  return bytes == 2 && elements_of_vector > 1 ? elements / 2 : elements;
}

/// What a thread of a block this large may use: the register file shared out, and at most what an
/// instruction can name.
inline std::int64_t registers_of_thread(const DeviceFacts& facts, std::int64_t block_threads) {
  const std::int64_t shared_out = facts.registers_per_multiprocessor / block_threads / 8 * 8;
  return std::min<std::int64_t>(255, shared_out);
}

}  // namespace fftune
