// The wgmma engine's stores for tiles whose rows are not those of one box of C: the last tile of a
// group of rows, which would reach into the next group, and tiles whose rows go to many places.
#pragma once

#include "gemm/wgmma_gradient.cuh"

namespace fftune {

// Where the rows of one consumer's tile go.
struct wgmma_target_rows {
  const u32* table;  // the row of C of each row, in shared memory; null where they are consecutive
  int first;         // the row of C of the first one, if they are
  int count;         // rows to store; the rest is padding
  bool whole;        // whether the copy engine may store boxes: padding falls outside of C
};

// The addresses of an epilogue's outputs, in their order.
template <class T>
struct wgmma_output_rows {
  T* c[3];
};

// From a box to the rows of C [rows, n], 16 bytes a thread: neighbours take one row.
template <class layout, class T>
__device__ __forceinline__ void copy_box_rows(const wgmma_target_rows& rows, T* c, u32 buffer,
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
    const u32 to = rows.table != nullptr ? rows.table[row] : rows.first + row;
    *reinterpret_cast<float4*>(c + static_cast<u64>(to) * static_cast<u32>(n) + column) = value;
  }
}

template <class T, class Epilogue, wgmma_tile tile>
struct wgmma_row_store : wgmma_store<T, Epilogue, tile> {
  using base = wgmma_store<T, Epilogue, tile>;
  using layout = typename base::layout;
  static_assert(!Epilogue::adds_residual && !Epilogue::adds_bias);

  // As wgmma_store::store; `feature` is the first of this consumer's outputs.
  static __device__ __forceinline__ void store(const typename base::owned_sums& sum,
                                               typename base::boxes& ring, const wgmma_outputs& to,
                                               const wgmma_output_rows<T>& c,
                                               const wgmma_target_rows& rows, int feature, int n,
                                               int barrier_id) {
#pragma unroll
    for (int box = 0; box < layout::boxes; ++box) {
      store_box<0>(sum, ring, to, c, rows, feature, n, box, barrier_id);
    }
  }

 private:
  template <int output>
  static __device__ __forceinline__ void store_box(const typename base::owned_sums& sum,
                                                   typename base::boxes& ring,
                                                   const wgmma_outputs& to,
                                                   const wgmma_output_rows<T>& c,
                                                   const wgmma_target_rows& rows, int feature,
                                                   int n, int box, int barrier_id) {
    const int thread = threadIdx.x % 128;
    const int at = feature + box * layout::box_features;
    const u32 buffer = ring.buffer(ring.take());
    if (thread == 0) tma_store_wait_read<tile.output_boxes - 1>();
    named_barrier_sync(barrier_id, 128);
    if constexpr (tile.swapped) {
      base::template write_swapped<output>(sum, buffer, box, thread, nullptr, at, n);
    } else {
      base::template write<output>(sum, buffer, box, thread, nullptr, at, n);
    }
    if (rows.whole) async_proxy_fence();
    named_barrier_sync(barrier_id, 128);
    if (!rows.whole) copy_box_rows<layout>(rows, c.c[output], buffer, at, n, thread);
    if (thread == 0) {
      if (rows.whole) tma_store(to.template map<output>(), buffer, at, rows.first);
      tma_store_commit();  // an empty group too: the wait above counts them
    }
    if constexpr (output + 1 < Epilogue::outputs) {
      store_box<output + 1>(sum, ring, to, c, rows, feature, n, box, barrier_id);
    }
  }
};

// The same of a gate's gradients, whose gate and up are in the rows of C.
template <class T, class Epilogue, wgmma_tile tile>
struct wgmma_gradient_row_store : wgmma_gradient_store<T, Epilogue, tile> {
  using base = wgmma_gradient_store<T, Epilogue, tile>;
  using layout = typename base::layout;

  static __device__ __forceinline__ void store(const typename base::sums& sum,
                                               typename base::boxes& ring,
                                               const typename base::outputs& to,
                                               const wgmma_output_rows<T>& c,
                                               const wgmma_target_rows& rows, int feature, int n,
                                               int barrier_id) {
    if (rows.whole) return base::store(sum, ring, to, rows.first, feature, n, barrier_id);
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int box = 0; box < layout::boxes; ++box) {
      const u32 place = ring.take(), buffer = ring.buffer(place);
      const int column = feature + box * layout::box_features;
      ring.wait(place);
      base::write(sum, buffer, box);
      named_barrier_sync(barrier_id, 128);
#pragma unroll
      for (int output = 0; output < base::buffers; ++output) {
        copy_box_rows<layout>(rows, c.c[output], buffer + output * layout::box_bytes, column, n,
                              thread);
      }
      named_barrier_sync(barrier_id, 128);  // the buffers are read: they may be filled again
      if (thread == 0 && box + tile.output_boxes < layout::boxes) {
        base::fetch(ring, place, to, column + tile.output_boxes * layout::box_features, rows.first);
      }
    }
  }
};

// The store of an epilogue.
template <class T, class Epilogue, wgmma_tile tile, bool gradient = is_gradient<Epilogue>>
struct wgmma_row_store_choice {
  using type = wgmma_row_store<T, Epilogue, tile>;
};
template <class T, class Epilogue, wgmma_tile tile>
struct wgmma_row_store_choice<T, Epilogue, tile, true> {
  using type = wgmma_gradient_row_store<T, Epilogue, tile>;
};
template <class T, class Epilogue, wgmma_tile tile>
using wgmma_row_store_of = typename wgmma_row_store_choice<T, Epilogue, tile>::type;

}  // namespace fftune
