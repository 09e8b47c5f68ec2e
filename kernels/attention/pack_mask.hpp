// The op pack-mask: a mask of bytes as attention's kernels read it, once for many layers.
//
// mask u8 [b, heads, s, kv], where a byte that is not zero allows the pair; mask_bits and
// mask_flags as kernels/attention/attention.hpp describes them. `heads` is 1 where all heads share
// a mask.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/attention.hpp"

namespace fftune::attention {

/// A mask in memory: `matrices` of [s, kv].
struct MaskShape {
  std::int64_t matrices = 0;
  std::int64_t s = 0;
  std::int64_t kv = 0;

  std::int64_t words() const { return mask_words(kv); }
  std::int64_t bits_bytes() const { return matrices * s * words() * 4; }
  std::int64_t flags_bytes() const {
    const auto tiles = [](std::int64_t extent) { return (extent + mask_tile - 1) / mask_tile; };
    return matrices * tiles(s) * tiles(kv);
  }
};

/// The places of pack-mask's tensors.
struct PackPlaces {
  static constexpr std::size_t mask = 0, bits = 1, flags = 2, count = 3;
};

/// Adds the launch that packs, with accesses of `vector` bytes, 0: as wide as rows allow.
void append_pack_mask(Program& program, const DeviceFacts& facts, const MaskShape& shape,
                      const Pointer& mask, const Pointer& bits, const Pointer& flags,
                      std::int64_t vector = 0);

/// The device source of that launch.
constexpr const char* pack_mask_source = "attention/pack_mask.cu";

std::vector<const Family*> pack_mask_cpu_families();
std::vector<const Family*> pack_mask_cuda_families();

MaskShape mask_shape_of(const Problem& problem);

}  // namespace fftune::attention
