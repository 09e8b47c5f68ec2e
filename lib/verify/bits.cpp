#include "verify/bits.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

#include "core/hash.hpp"

namespace fftune {
namespace {

/// Eight bytes at a time: byte by byte, FNV-1a would take as long as the verification itself. The
/// multiplier is that of fnv1a; the shift brings the high bits, which it mixes best, back down.
std::uint64_t hash_of_piece(const std::byte* data, std::size_t bytes) {
  std::uint64_t state = fnv1a_offset;
  std::size_t at = 0;
  for (; at + sizeof state <= bytes; at += sizeof state) {
    std::uint64_t word;
    std::memcpy(&word, data + at, sizeof word);
    state = (state ^ word) * 0x100000001b3u;
    state ^= state >> 32;
  }
  return fnv1a({reinterpret_cast<const char*>(data) + at, bytes - at}, state);
}

}  // namespace

std::uint64_t hash_of_bits(const std::byte* data, std::size_t bytes, Parallel& parallel) {
  constexpr std::size_t piece = std::size_t{1} << 18;
  std::vector<std::uint64_t> hashes((bytes + piece - 1) / piece);
  parallel.run(static_cast<int>(hashes.size()), parallel.max_threads(), [&](int index) {
    const std::size_t begin = static_cast<std::size_t>(index) * piece;
    hashes[static_cast<std::size_t>(index)] =
        hash_of_piece(data + begin, std::min(piece, bytes - begin));
  });
  return fnv1a({reinterpret_cast<const char*>(hashes.data()), hashes.size() * sizeof hashes[0]});
}

}  // namespace fftune
