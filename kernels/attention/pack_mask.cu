// A mask of bytes as bits, with a flag for each tile of 64 queries and 64 keys: empty, full, or
// mixed.
//
// A block has one row of tiles and 512 keys. Warps take its rows in turn, and a lane has 16 keys of
// each; pairs of lanes join their bits to words. Shared memory combines the results (any, all) of
// the lanes. Bits beyond the last key are 0 and count for no flag.
//
// Grid: column blocks of each row of tiles of each matrix. Block: 256.
#include "attention/form.cuh"
#include "common/async.cuh"
#include "common/types.cuh"

namespace fftune {

namespace {

// One bit for each of four bytes that is not zero.
__device__ __forceinline__ u32 nonzero_bytes(u32 word) {
  const u32 high = (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) & 0x80808080u;
  return (high >> 7) * 0x01020408u >> 24 & 0xf;
}

// Keys [0, 16) of `from`; `count` of them exist, at least 1. The others repeat existing keys:
// without a branch, loads of many rows are under way at a time.
template <int vector>
__device__ __forceinline__ uint4 load_keys(const u8* from, int count) {
  if constexpr (vector == 16) {
    return *reinterpret_cast<const uint4*>(from);
  } else if constexpr (vector == 8) {
    const uint2 low = *reinterpret_cast<const uint2*>(from);
    const uint2 high = *reinterpret_cast<const uint2*>(from + (count > 8 ? 8 : 0));
    return make_uint4(low.x, low.y, high.x, high.y);
  } else {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u8* const at = from + (i * 4 < count ? i * 4 : 0);
      if constexpr (vector == 4) {
        words[i] = *reinterpret_cast<const u32*>(at);
      } else {
        words[i] = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          words[i] |= u32{at[i * 4 + j < count ? j : 0]} << j * 8;
        }
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

__device__ __forceinline__ u32 nonzero_keys(const uint4& bytes) {
  return nonzero_bytes(bytes.x) | nonzero_bytes(bytes.y) << 4 | nonzero_bytes(bytes.z) << 8 |
         nonzero_bytes(bytes.w) << 12;
}

}  // namespace

// mask [matrices, s, kv] with rows aligned to `vector` bytes; bits [matrices, s, words]; flags
// [matrices, ceil(s / 64), ceil(kv / 64)].
template <int vector>
__global__ void __launch_bounds__(256)
    pack_mask(const u8* mask, u32* bits, u8* flags, int s, int kv, int words) {
  constexpr int tile = attention_flag_tile, keys_of_block = 512, warps = 8;
  constexpr int tiles = keys_of_block / tile;
  __shared__ u32 shared_any[tiles], shared_missing[tiles];
  wait_and_launch_dependents();
  const int across = ceil_div(words * 32, keys_of_block), down = ceil_div(s, tile);
  const int column_block = static_cast<int>(blockIdx.x) % across;
  const int row_tile = static_cast<int>(blockIdx.x) / across % down;
  const i64 matrix = static_cast<int>(blockIdx.x) / across / down;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int key = column_block * keys_of_block + lane * 16;
  const int count = kv - key;
  const u32 existing = count >= 16 ? 0xffffu : count > 0 ? (1u << count) - 1 : 0u;
  if (threadIdx.x < tiles) shared_any[threadIdx.x] = shared_missing[threadIdx.x] = 0;
  __syncthreads();

  constexpr int rows_of_warp = tile / warps;
  const int first_row = row_tile * tile + warp;
  uint4 keys[rows_of_warp];
#pragma unroll
  for (int i = 0; i < rows_of_warp; ++i) {
    const int row = smaller(first_row + i * warps, s - 1);
    const u8* const from = mask + (matrix * s + row) * kv;
    keys[i] = load_keys<vector>(from + (count > 0 ? key : 0), count > 0 ? count : kv);
  }
  u32 any = 0, missing = 0;
#pragma unroll
  for (int i = 0; i < rows_of_warp; ++i) {
    const int row = first_row + i * warps;
    if (row >= s) break;
    const u32 own = nonzero_keys(keys[i]) & existing;
    any |= own;
    missing |= own ^ existing;
    const u32 word = own | __shfl_down_sync(~0u, own, 1) << 16;
    const int at = key / 32;
    if (lane % 2 == 0 && at < words) bits[(matrix * s + row) * words + at] = word;
  }
  if (any != 0) atomicOr(&shared_any[lane / 4], 1u);
  if (missing != 0) atomicOr(&shared_missing[lane / 4], 1u);
  __syncthreads();
  const int column_tiles = ceil_div(kv, tile);
  const int column_tile = column_block * tiles + static_cast<int>(threadIdx.x);
  if (threadIdx.x < tiles && column_tile < column_tiles) {
    const int flag = shared_any[threadIdx.x] == 0       ? tile_empty
                     : shared_missing[threadIdx.x] == 0 ? tile_full
                                                        : tile_mixed;
    flags[(matrix * down + row_tile) * column_tiles + column_tile] = static_cast<u8>(flag);
  }
}

}  // namespace fftune
