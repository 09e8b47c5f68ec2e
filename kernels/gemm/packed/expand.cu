// Packed weights of 4 bits (layout.cuh) to a dense weight [n, k].
//
// A warp expands a block of 16 rows and 64 elements of k: each lane has 32 codes of two rows, which
// go through shared memory, so that rows are written whole.
#include "common/async.cuh"
#include "common/vectors.cuh"
#include "gemm/packed/codes.cuh"

namespace fftune {

constexpr int expand_warps = 4;

// Grid: ceil(blocks / expand_warps). Block: 32 * expand_warps. `group`: elements of k that share a
// scale; zeros: null, or a zero point for each scale. A header that is not of this layout makes
// the weight NaN.
template <class T, packed_code code>
__global__ void __launch_bounds__(32 * expand_warps)
    expand_weight(const u8* codes, const void* scales, const u8* zeros, T* dense, i64 n, i64 k,
                  i64 group) {
  __shared__ __align__(16) T tile[expand_warps][packed_rows][packed_k];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 k_blocks = packed_k_blocks(k), blocks = packed_blocks(n, k) - 1;
  const i64 block = static_cast<i64>(blockIdx.x) * expand_warps + warp;
  wait_and_launch_dependents();
  if (block >= blocks) return;
  const i64 first_row = block / k_blocks * packed_rows, first_k = block % k_blocks * packed_k;
  const i64 groups = ceil_div(k, group);

  const vector16 header = load_cached(codes);
  const bool known = is_packed(header, code, n, k);
  const vector16 words = load_streaming(codes + (1 + block) * packed_block_bytes + lane * 16);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const u32 word = words.word[step];
#pragma unroll
    for (int nibble = 0; nibble < 8; ++nibble) {
      const int row = lane / 4 * 2 + nibble % 2;
      const int column = step * 16 + lane % 4 * 2 + nibble / 2 % 2 * 8 + nibble / 4;
      const i64 at = first_k + column < k ? first_k + column : k - 1;
      const i64 place = packed_scale_place(first_row + row, at / group, groups);
      const u32 of_code = word >> 4 * nibble & 15;
      float value;
      if constexpr (code == packed_code::mxfp4) {
        value = __uint_as_float((of_code & 8) << 28 | (of_code & 7) << 22) * 0x1p126f *
                e8m0_value(static_cast<const u8*>(scales)[place]);
      } else {
        const int zero = zeros != nullptr ? zeros[place] : 8;
        value = static_cast<float>(static_cast<int>(of_code) - zero) *
                to_float(static_cast<const T*>(scales)[place]);
      }
      tile[warp][row][column] = from_float<T>(known ? value : __uint_as_float(0x7fffffff));
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
