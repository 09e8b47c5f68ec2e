// SplitMix64 (Steele, Lea, Flood 2014): numbers that look random, by counting.
#pragma once

#include <cstdint>

namespace fftune {

/// Increment of its state.
inline constexpr std::uint64_t golden = 0x9e3779b97f4a7c15u;

/// Its output function: a bijection.
constexpr std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace fftune
