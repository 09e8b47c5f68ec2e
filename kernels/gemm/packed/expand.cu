// Packed weights (layout.cuh) to a dense weight [n, k].
//
// A warp expands a block of 16 rows and 64 elements of k: each lane has 32 codes of two rows, which
// go through shared memory, so that rows are written whole.
#include "common/async.cuh"
#include "common/vectors.cuh"
#include "gemm/packed/codes.cuh"

namespace fftune {

constexpr int expand_warps = 4;

// `place`: of the group's scale; `row_place`: of the row's.
template <class T, packed_code code>
__device__ __forceinline__ float scale_value(const void* scales, i64 place, i64 row_place) {
  const u8* const bytes = static_cast<const u8*>(scales);
  if constexpr (code == packed_code::mxfp4) {
    return e8m0_value(bytes[place]);
  } else if constexpr (packed_scales_rows(code)) {
    return code_value<packed_code::fp8>(bytes[place]) *
           *reinterpret_cast<const float*>(bytes + row_place);
  } else if constexpr (packed_scale_bytes(code) == 4) {
    return static_cast<const float*>(scales)[place];
  } else {
    return to_float(static_cast<const T*>(scales)[place]);
  }
}

// Grid: ceil(blocks / expand_warps). Block: 32 * expand_warps. `group`: elements of k that share a
// scale; zeros: null, or a zero point for each scale. A header that is not of this layout makes
// the weight NaN.
template <class T, packed_code code>
__global__ void __launch_bounds__(32 * expand_warps)
    expand_weight(const u8* codes, const void* scales, const u8* zeros, T* dense, i64 n, i64 k,
                  i64 group) {
  __shared__ __align__(16) T tile[expand_warps][packed_rows][packed_k];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 k_blocks = packed_k_blocks(k), blocks = packed_tiles(n) * k_blocks;
  const i64 block = static_cast<i64>(blockIdx.x) * expand_warps + warp;
  wait_and_launch_dependents();
  if (block >= blocks) return;
  const i64 first_row = block / k_blocks * packed_rows, first_k = block % k_blocks * packed_k;
  const i64 groups = ceil_div(k, group);

  const vector16 header = load_dependent(codes);
  const bool known = is_packed(header, code, n, k);
  constexpr int parts = packed_parts(code), bits = packed_bits(code);
#pragma unroll
  for (int part = 0; part < parts; ++part) {
    vector16 words =
        load_dependent(codes + (1 + block * parts + part) * packed_part_bytes + lane * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) words.word[i] = packed_nibbles_of(words.word[i], code);
#pragma unroll
    for (int i = 0; i < 128 / bits; ++i) {
      const int step = i / 8 + part * 2;
      const int row = lane / 4 * 2 + i % 2;
      const int within = bits == 4 ? i / 2 % 2 * 8 + i / 4 % 2 : i / 2 % 2 + i / 4 % 2 * 8;
      const int column = step * 16 + lane % 4 * 2 + within;
      const i64 at = first_k + column < k ? first_k + column : k - 1;
      const i64 place = packed_scale_place(first_row + row, at / group, groups, code);
      const u32 own = words.word[i * bits / 32] >> i * bits % 32 & ((1u << bits) - 1);
      const float scale =
          scale_value<T, code>(scales, place, packed_row_scale_place(first_row + row, groups));
      float value;
      if constexpr (code == packed_code::int4) {
        value = static_cast<float>(static_cast<int>(own) - (zeros != nullptr ? zeros[place] : 8));
      } else {
        value = code_value<code>(own);
      }
      tile[warp][row][column] = from_float<T>(known ? value * scale : __uint_as_float(0x7fffffff));
    }
  }
  __syncwarp();
  constexpr int elements = 16 / sizeof(T), row_vectors = packed_k / elements;
  if (k % elements == 0) {
    for (int i = lane; i < packed_rows * row_vectors; i += 32) {
      const i64 row = first_row + i / row_vectors, column = first_k + i % row_vectors * elements;
      if (row < n && column < k) {
        store(dense + row * k + column,
              *reinterpret_cast<const vector16*>(
                  &tile[warp][i / row_vectors][i % row_vectors * elements]));
      }
    }
  } else {
    for (int i = lane; i < packed_rows * packed_k; i += 32) {
      const i64 row = first_row + i / packed_k, column = first_k + i % packed_k;
      if (row < n && column < k) dense[row * k + column] = tile[warp][i / packed_k][i % packed_k];
    }
  }
}

}  // namespace fftune
