// Rows that are not aligned to 16 bytes to rows that are, and back.
//
// A thread writes 16 bytes, aligned in `to`, from the 32 bytes around them in `from`: two aligned
// loads, and a shift by words and then by half a word. Chunks that end a row, or the matrix, are
// copied by elements.
#include "common/async.cuh"
#include "common/vectors.cuh"
#include "gemm/padded/params.cuh"
#include "gemm/padded/shifted.cuh"

namespace fftune {

__device__ __forceinline__ i64 quotient_of(i64 of, i64 by) {
  if ((of | by) >> 32 == 0) return static_cast<u32>(of) / static_cast<u32>(by);
  return of / by;
}

// Where element `at` of `to` comes from, or -1: zero. `column` is that of the matrix.
__device__ __forceinline__ i64 source_of(const row_copy& copy, i64 at, int& column) {
  i64 row = quotient_of(at, copy.to_columns);
  column = static_cast<int>(at - row * copy.to_columns) - copy.before;
  if (copy.rows != copy.to_rows) {
    const i64 matrix = quotient_of(row, copy.to_rows), within = row - matrix * copy.to_rows;
    if (within >= copy.rows) return -1;
    row = matrix * copy.rows + within;
  }
  return column >= 0 && column < copy.columns ? row * copy.columns + column : -1;
}

// Whether eight elements from there on are one row's in both, with 32 bytes to load around them;
// those begin at `readable` at most.
__device__ __forceinline__ bool is_whole(const row_copy& copy, i64 source, int column,
                                         i64 readable) {
  return source >= 0 && column + 8 <= copy.columns && column + copy.before + 8 <= copy.to_columns &&
         source / 8 * 8 <= readable;
}

__device__ __forceinline__ void copy_elements(const row_copy& copy, i64 first, i64 last) {
  for (i64 at = first; at < last; ++at) {
    int column;
    const i64 source = source_of(copy, at, column);
    static_cast<u16*>(copy.to)[at] =
        source < 0 ? u16{0} : static_cast<const volatile u16*>(copy.from)[source];
  }
}

// Grid: (any, copies). Block: row_copy_threads.
__global__ void __launch_bounds__(row_copy_threads)
    copy_rows(const __grid_constant__ row_copies copies) {
  const row_copy copy = copies.each[blockIdx.y];
  const i64 elements = copy.matrices * copy.to_rows * copy.to_columns;
  const i64 readable = copy.matrices * copy.rows * copy.columns - 16;
  const i64 step = i64{8} * row_copy_threads;
  wait_and_launch_dependents();
  for (i64 first = (static_cast<i64>(blockIdx.x) * row_copy_unroll * row_copy_threads +
                    static_cast<i64>(threadIdx.x)) *
                   8;
       first < elements; first += static_cast<i64>(gridDim.x) * row_copy_unroll * step) {
    i64 source[row_copy_unroll];
    bool all = true;
#pragma unroll
    for (int i = 0; i < row_copy_unroll; ++i) {
      const i64 at = first + i * step;
      int column;
      source[i] = source_of(copy, at, column);
      all = all && at + 8 <= elements && is_whole(copy, source[i], column, readable);
    }
    const u16* const from = static_cast<const u16*>(copy.from);
    u16* const to = static_cast<u16*>(copy.to);
    if (all) {
      vector16 low[row_copy_unroll], high[row_copy_unroll];
#pragma unroll
      for (int i = 0; i < row_copy_unroll; ++i) {
        low[i] = load_dependent(from + source[i] / 8 * 8);
        high[i] = load_dependent(from + source[i] / 8 * 8 + 8);
      }
#pragma unroll
      for (int i = 0; i < row_copy_unroll; ++i) {
        store(to + first + i * step, shifted(low[i], high[i], static_cast<u32>(source[i]) % 8));
      }
    } else {
      for (int i = 0; i < row_copy_unroll; ++i) {
        const i64 at = first + i * step;
        if (at >= elements) break;
        int column;
        const i64 own = source_of(copy, at, column);
        if (at + 8 <= elements && is_whole(copy, own, column, readable)) {
          const u16* const chunk = from + own / 8 * 8;
          store(to + at, shifted(load_dependent(chunk), load_dependent(chunk + 8),
                                 static_cast<u32>(own) % 8));
        } else {
          copy_elements(copy, at, at + 8 < elements ? at + 8 : elements);
        }
      }
    }
  }
}

}  // namespace fftune
