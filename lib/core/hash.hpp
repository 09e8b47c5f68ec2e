// FNV-1a, 64 bits: names cache entries and marks kernel sources; no secret depends on it.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace fftune {

constexpr std::uint64_t fnv1a_offset = 0xcbf29ce484222325u;

/// The hash of `bytes`, continuing from `state` (http://www.isthe.com/chongo/tech/comp/fnv/).
constexpr std::uint64_t fnv1a(std::string_view bytes, std::uint64_t state = fnv1a_offset) {
  for (const char byte : bytes) state = (state ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  return state;
}

/// Sixteen lower-case hexadecimal digits.
inline std::string hex(std::uint64_t value) {
  return fmt::format("{:016x}", value);
}

// SplitMix64 (Steele, Lea, Flood 2014): numbers that look random, by counting.

/// Increment of its state.
inline constexpr std::uint64_t golden = 0x9e3779b97f4a7c15u;

/// Its output function: a bijection.
constexpr std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace fftune
