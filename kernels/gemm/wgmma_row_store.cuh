// The wgmma engine's store for tiles whose rows are not those of one box of C: the last tile of a
// group of rows, which would reach into the next group, and tiles whose rows go to many places.
#pragma once

#include "gemm/wgmma_store.cuh"

namespace fftune {

// Where the rows of one consumer's tile go.
template <class T>
struct wgmma_target_rows {
  T* c;
  const u32* table;  // the row of C of each row, in shared memory; null where they are consecutive
  int first;         // the row of C of the first one, if they are
  int count;         // rows to store; the rest is padding
  bool whole;        // whether the copy engine may store boxes: padding falls outside of C
};

template <class T, class Epilogue, wgmma_tile tile>
struct wgmma_row_store : wgmma_store<T, Epilogue, tile> {
  using base = wgmma_store<T, Epilogue, tile>;
  using layout = typename base::layout;
  static_assert(Epilogue::outputs == 1 && !Epilogue::adds_residual && !Epilogue::adds_bias);

  // As wgmma_store::store; `feature` is the first of this consumer's outputs.
  static __device__ __forceinline__ void store(const typename base::owned_sums& sum,
                                               typename base::boxes& ring, const tensor_map& map,
                                               const wgmma_target_rows<T>& rows, int feature, int n,
                                               int barrier_id) {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int box = 0; box < layout::boxes; ++box) {
      const int at = feature + box * layout::box_features;
      const u32 buffer = ring.buffer(ring.take());
      if (thread == 0) tma_store_wait_read<tile.output_boxes - 1>();
      named_barrier_sync(barrier_id, 128);
      if constexpr (tile.swapped) {
        base::template write_swapped<0>(sum, buffer, box, thread, nullptr, at, n);
      } else {
        base::template write<0>(sum, buffer, box, thread, nullptr, at, n);
      }
      if (rows.whole) async_proxy_fence();
      named_barrier_sync(barrier_id, 128);
      if (!rows.whole) copy_rows(rows, buffer, at, n, thread);
      if (thread == 0) {
        if (rows.whole) tma_store(map, buffer, at, rows.first);
        tma_store_commit();  // an empty group too: the wait above counts them
      }
    }
  }

 private:
  // From a box to the rows of C, 16 bytes a thread: neighbours take one row.
  static __device__ __forceinline__ void copy_rows(const wgmma_target_rows<T>& rows, u32 buffer,
                                                   int feature, int n, int thread) {
    constexpr int row_chunks = layout::box_features / 8;
    const int chunk = thread % row_chunks, column = feature + chunk * 8;
    if (column >= n) return;
#pragma unroll 4
    for (int row = thread / row_chunks; row < layout::box_tokens; row += 128 / row_chunks) {
      if (row >= rows.count) return;
      const int swizzle = layout::box_features == 64   ? row & 7
                          : layout::box_features == 32 ? row >> 1 & 3
                                                       : row >> 2 & 1;
      const float4 value =
          load_shared(buffer + row * layout::box_features * 2 + ((chunk ^ swizzle) << 4));
      const i64 to = rows.table != nullptr ? rows.table[row] : rows.first + row;
      *reinterpret_cast<float4*>(rows.c + to * n + column) = value;
    }
  }
};

}  // namespace fftune
