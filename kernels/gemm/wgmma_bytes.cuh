// Boxes of one-byte elements from the accumulators of the wgmma engine. stmatrix would put four
// neighbouring bytes where a thread holds two, so these are ordinary stores.
#pragma once

#include "common/float8.cuh"

namespace fftune {

__device__ __forceinline__ void store_pair(u32 address, u16 bytes) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(bytes) : "memory");
}
// The lower of two bytes.
__device__ __forceinline__ void store_byte(u32 address, u16 bytes) {
  asm volatile("st.shared.b8 [%0], %1;" ::"r"(address), "h"(bytes) : "memory");
}

// The place of byte `column` of row `row` in a box of that width, under the swizzle of 64 or 32
// bytes: 16-byte chunks are exchanged by address bits 7 and up.
template <int row_bytes>
__device__ __forceinline__ u32 byte_place(u32 buffer, int row, int column) {
  static_assert(row_bytes == 64 || row_bytes == 32);
  const int swizzle = row_bytes == 64 ? row >> 1 & 3 : row >> 2 & 1;
  return buffer + row * row_bytes + ((column >> 4 ^ swizzle) << 4) + (column & 15);
}

// Writes box `box`; finish(part, at) yields the accumulators at and at + 1 as two bytes.
template <class Layout, bool swapped, class Finish>
__device__ __forceinline__ void wgmma_write_bytes(u32 buffer, int box, int thread,
                                                  const Finish& finish) {
  constexpr int width = Layout::box_features;
  const int first_row = thread / 32 * 16 + thread % 32 / 4, first_column = thread % 4 * 2;
  if constexpr (swapped) {  // features x tokens; the box is the part
#pragma unroll
    for (int at = 0; at < Layout::box_tokens / 2; at += 2) {
      const int token = at / 4 * 8 + first_column, feature = first_row + (at & 2) * 4;
      const u16 pair = finish(box, at);
      store_byte(byte_place<width>(buffer, token, feature), pair);
      store_byte(byte_place<width>(buffer, token + 1, feature), static_cast<u16>(pair >> 8));
    }
  } else {
#pragma unroll
    for (int part = 0; part < Layout::parts; ++part) {
#pragma unroll
      for (int at = 0; at < width / 2; at += 2) {
        const int row = part * 64 + first_row + (at & 2) * 4, column = at / 4 * 8 + first_column;
        store_pair(byte_place<width>(buffer, row, column), finish(part, box * width / 2 + at));
      }
    }
  }
}

}  // namespace fftune
