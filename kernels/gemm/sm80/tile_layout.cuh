// Tiles of 16-bit elements in shared memory, swizzled so that no access conflicts. K-major: [rows,
// bk], k contiguous.
//
// A row is bk/8 chunks of 16 bytes. An ldmatrix reads one chunk column of eight consecutive rows in
// one phase, and the 32 banks hold eight chunks. The chunk index is XORed with the row so that
// those eight rows hit eight different bank groups. Rows of 128 bytes or more: chunk ^ (row & 7).
// Rows of 64 bytes share a bank line in pairs, so the pair index decides: chunk ^ ((row >> 1) & 3).
// The pattern repeats every eight rows.
#pragma once

#include "common/types.cuh"

namespace fftune {

template <int bk>
struct k_major_layout {
  static_assert(bk == 32 || bk == 64 || bk == 128);
  static constexpr int row_bytes = bk * 2;
  static constexpr int row_chunks = bk / 8;

  static __host__ __device__ constexpr u32 offset(int row, int chunk) {
    const int swizzle = bk == 32 ? (row >> 1) & 3 : row & 7;
    return static_cast<u32>(row * row_bytes + ((chunk ^ swizzle) << 4));
  }

  // Where lane `lane` points ldmatrix.x4 so that it yields the four registers of an A fragment (16
  // rows of m by 16 of k): matrices in the order (rows 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15),
  // (8-15, 8-15).
  static __host__ __device__ constexpr u32 a_fragment(int row, int lane) {
    return offset(row + (lane & 15), lane >> 4);
  }

  // The same for two B fragments (16 rows of n by 16 of k): (n 0-7, k 0-7), (0-7, 8-15), (8-15,
  // 0-7), (8-15, 8-15).
  static __host__ __device__ constexpr u32 b_fragment(int row, int lane) {
    return offset(row + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  }

  // The same fragment `step` k16 steps on: chunk indices are XORed, so the byte offset is too.
  static __host__ __device__ constexpr u32 advance(u32 fragment_offset, int step) {
    return fragment_offset ^ static_cast<u32>(step << 5);
  }

  // The one `index` times 16 rows on.
  static __host__ __device__ constexpr u32 next(u32 fragment_offset, int index) {
    return fragment_offset + static_cast<u32>(index * 16 * row_bytes);
  }
};

// MN-major: [bk, rows], the rows contiguous: ldmatrix.trans makes the same fragments of it.
template <int rows>
struct mn_major_layout {
  static_assert(rows == 32 || rows == 64 || rows == 128 || rows == 256);
  static constexpr int row_bytes = rows * 2;  // of one k
  static constexpr int row_chunks = rows / 8;

  static __host__ __device__ constexpr u32 offset(int k, int chunk) {
    const int swizzle = rows == 32 ? (k >> 1) & 3 : k & 7;
    return static_cast<u32>(k * row_bytes + ((chunk ^ swizzle) << 4));
  }

  // As those of k_major_layout, with a lane's address on a k instead of a row.
  static __host__ __device__ constexpr u32 a_fragment(int row, int lane) {
    return offset((lane & 7) + ((lane >> 4) << 3), row / 8 + ((lane >> 3) & 1));
  }
  static __host__ __device__ constexpr u32 b_fragment(int row, int lane) {
    return offset((lane & 7) + (((lane >> 3) & 1) << 3), row / 8 + (lane >> 4));
  }
  // 16 of k are two periods of the swizzle.
  static __host__ __device__ constexpr u32 advance(u32 fragment_offset, int step) {
    return fragment_offset + static_cast<u32>(step * 16 * row_bytes);
  }
  // A warp's rows begin at a multiple of its extent, a power of two: adding to their chunks is XOR.
  static __host__ __device__ constexpr u32 next(u32 fragment_offset, int index) {
    return fragment_offset ^ static_cast<u32>(index << 5);
  }
};

}  // namespace fftune
