// Filling shared memory with [rows, bk] tiles of a row-major matrix, in the layout that ldmatrix
// reads.
#pragma once

#include "common/async_copy.cuh"
#include "gemm/tile_layout.cuh"

namespace fftune {

// One block's part in copying [rows, bk] tiles of a row-major matrix into shared memory, one k tile
// after another. Rows past `valid_rows` and elements of k past the end become zeros.
template <int rows, int bk, int threads>
class tile_copy {
  using layout = tile_layout<bk>;
  static constexpr int chunks = rows * layout::row_chunks;
  static constexpr int row_step =
      threads / layout::row_chunks;  // rows between a thread's consecutive chunks
  static_assert(threads % layout::row_chunks == 0);

 public:
  static constexpr int steps = ceil_div(chunks, threads);
  static constexpr int bytes = rows * layout::row_bytes;

  template <class T>
  __device__ __forceinline__ tile_copy(const T* matrix, i64 first_row, int valid_rows, i64 k,
                                       i64 first_k, int thread)
      : thread_(thread),
        row_(thread / layout::row_chunks),
        valid_(valid_rows - row_),
        chunk_k_(thread % layout::row_chunks * 8),
        shared_(layout::offset(row_, thread % layout::row_chunks)),
        stride_(row_step * k * 2),
        source_(
            reinterpret_cast<const char*>(matrix + (first_row + row_) * k + first_k + chunk_k_)) {}

  // Copies the chunk numbers [first, last) of this thread for the current k tile, which has
  // `valid_k` elements left.
  template <int first, int last>
  __device__ __forceinline__ void issue(u32 shared_tile, int valid_k) const {
    const bool k_is_valid = chunk_k_ < valid_k;
    const char* source =
        source_ + first * stride_;  // one running pointer takes fewer registers than one each
#pragma unroll
    for (int step = first; step < last; ++step, source += stride_) {
      if ((step + 1) * threads <= chunks || thread_ + step * threads < chunks) {
        copy_async(shared_tile + shared_offset(step), source,
                   k_is_valid && step * row_step < valid_);
      }
    }
  }

  __device__ __forceinline__ void next_tile() {
    source_ += layout::row_bytes;
  }
  // The bytes from the start of k to element `k` of it.
  static __device__ __forceinline__ i64 distance(i64 k, i64 /*pitch*/) {
    return k * 2;
  }
  __device__ __forceinline__ void move(i64 bytes) {
    source_ += bytes;
  }

 private:
  __device__ __forceinline__ u32 shared_offset(int step) const {
    if constexpr (row_step % 8 == 0) {  // whole periods of the swizzle
      return shared_ + step * row_step * layout::row_bytes;
    } else {
      return layout::offset(row_ + step * row_step, chunk_k_ / 8);
    }
  }

  int thread_, row_, valid_, chunk_k_;
  u32 shared_;
  i64 stride_;
  const char* source_;
};

// The same of a matrix [k, pitch], whose rows are contiguous: tiles [bk][rows].
template <int rows, int bk, int threads>
class transposed_tile_copy {
  using layout = transposed_tile_layout<rows>;
  static constexpr int chunks = bk * layout::row_chunks;
  static constexpr int k_step = threads / layout::row_chunks;  // between a thread's chunks
  static_assert(threads % layout::row_chunks == 0);

 public:
  static constexpr int steps = ceil_div(chunks, threads);
  static constexpr int bytes = bk * layout::row_bytes;

  template <class T>
  __device__ __forceinline__ transposed_tile_copy(const T* matrix, i64 first_row, int valid_rows,
                                                  i64 pitch, i64 first_k, int thread)
      : thread_(thread),
        k_(thread / layout::row_chunks),
        chunk_(thread % layout::row_chunks),
        row_is_valid_(chunk_ * 8 < valid_rows),
        pitch_bytes_(pitch * 2),
        source_(reinterpret_cast<const char*>(matrix + (first_k + k_) * pitch + first_row +
                                              chunk_ * 8)) {}

  template <int first, int last>
  __device__ __forceinline__ void issue(u32 shared_tile, int valid_k) const {
    const char* source = source_ + first * k_step * pitch_bytes_;
#pragma unroll
    for (int step = first; step < last; ++step, source += k_step * pitch_bytes_) {
      if ((step + 1) * threads <= chunks || thread_ + step * threads < chunks) {
        const int k = k_ + step * k_step;
        copy_async(shared_tile + layout::offset(k, chunk_), source, row_is_valid_ && k < valid_k);
      }
    }
  }

  __device__ __forceinline__ void next_tile() {
    source_ += bk * pitch_bytes_;
  }
  static __device__ __forceinline__ i64 distance(i64 k, i64 pitch) {
    return k * pitch * 2;
  }
  __device__ __forceinline__ void move(i64 bytes) {
    source_ += bytes;
  }

 private:
  int thread_, k_, chunk_;
  bool row_is_valid_;
  i64 pitch_bytes_;
  const char* source_;
};

// The layout and the copy of an operand.
template <bool transposed, int rows, int bk, int threads>
struct tile_operand {
  using layout = tile_layout<bk>;
  using copy = tile_copy<rows, bk, threads>;
};
template <int rows, int bk, int threads>
struct tile_operand<true, rows, bk, threads> {
  using layout = transposed_tile_layout<rows>;
  using copy = transposed_tile_copy<rows, bk, threads>;
};

}  // namespace fftune
