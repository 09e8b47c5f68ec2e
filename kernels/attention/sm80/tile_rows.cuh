// The rows of a tile of queries in global memory, as both forward kernels read and write them.
#pragma once

#include "attention/mma_tile.cuh"
#include "attention/tile_scheduler.cuh"

namespace fftune {

template <attention_form form>
struct attention_tile_rows {
  using T = element_type<form.type>;
  using chunks_of_row = row_chunks<T, form.dim>;

  const attention_params& p;
  const attention_tile& tile;

  // Row `row` of the tile of a tensor, whose element 0 of the head is `first`.
  template <class Element>
  __device__ __forceinline__ Element* at(Element* first, int row, i64 batch_stride,
                                         int row_stride) const {
    const int query = tile.first_row + row;
    return first + (static_cast<i64>(tile.sequence.q_first + query) * row_stride +
                    (form.packed_sequences() ? 0 : tile.sequence.index * batch_stride));
  }
  __device__ __forceinline__ bool exists(int row) const {
    return tile.first_row + row < tile.sequence.q_len;
  }

  // Starts to copy `rows` rows of q to shared memory, by `threads` threads; zeros where there is
  // nothing.
  template <class Layout, int rows, int threads>
  __device__ __forceinline__ void load_q(u32 to) const {
    const T* const q = static_cast<const T*>(p.q) + tile.head * form.dim;
    constexpr bool pads = Layout::padded > attention_padded_dim(form.dim);
#pragma unroll 4
    for (int index = threadIdx.x; index < rows * Layout::chunks; index += threads) {
      const int row = index / Layout::chunks, chunk = index % Layout::chunks;
      chunks_of_row::copy(to + Layout::offset(row, chunk), at(q, row, p.q_batch, p.q_row), chunk,
                          exists(row) && (!pads || chunk * 8 < form.dim));
    }
  }

  __device__ __forceinline__ void store_lse(int row, const softmax_result& result) const {
    const i64 matrix = form.packed_sequences()
                           ? tile.head
                           : static_cast<i64>(tile.sequence.index) * p.heads + tile.head;
    p.lse[matrix * p.q_len + tile.sequence.q_first + tile.first_row + row] =
        result.lse * natural_log_of_2;
  }
};

}  // namespace fftune
