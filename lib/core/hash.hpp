// FNV-1a, 64 bits: names cache entries and marks kernel sources; no secret depends on it.
#pragma once

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
std::string hex(std::uint64_t value);

}  // namespace fftune
