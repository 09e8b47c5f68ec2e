// Rows of one of two matrices by a mask, as a pipeline of library products needs it after both
// experts have seen every token: for comparison in `bench`.
//
// out_i = first_i where mask[i] is not zero, else second_i; all are [rows, columns], row-major, out
// may be one of the others, and one that is null has zeros. A thread takes 16 bytes; where rows are
// not 16-byte aligned, the same elements one by one. Grid: (ceil(columns / elements of a thread /
// 256), min(rows, 65535)). Block: 256 threads.
#include "common/numerics.cuh"
#include "common/vectors.cuh"
#include "gemm/groups.cuh"

namespace fftune {

template <class T>
__global__ void __launch_bounds__(256)
    select_rows(const u8* mask, const T* first, const T* second, T* out, i64 rows, i64 columns) {
  constexpr int elements = 16 / sizeof(T);
  const i64 column = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * elements;
  for (i64 row = blockIdx.y; row < rows && column < columns; row += gridDim.y) {
    const T* const matrix = mask[row] != 0 ? first : second;
    const T* const from = matrix + row * columns + column;
    T* const to = out + row * columns + column;
    if (columns % elements == 0) {
      store(to, matrix == nullptr ? vector16{} : load_dependent(from));
    } else {
      for (int i = 0; i < elements && column + i < columns; ++i) {
        to[i] = matrix == nullptr ? from_float<T>(0) : from[i];
      }
    }
  }
}

// From the order of the mask to that of the tokens. Grid: any. Block: 256 threads.
template <class T>
__global__ void __launch_bounds__(256, 4)
    restore_rows(const u8* mask, const T* sorted, T* out, int rows, i64 columns) {
  __shared__ u32 words[mask_groups::shared_words];
  gemm_params params = {};
  params.mask = mask;
  const mask_groups groups = mask_groups::build<256>(params, rows, words);
  for (int place = blockIdx.x; place < rows; place += gridDim.x) {
    const int group = place < groups.count(0) ? 0 : 1;
    const i64 token = groups.row_of(group, place - groups.first(group));
    for (i64 column = threadIdx.x; column < columns; column += 256) {
      out[token * columns + column] = sorted[place * columns + column];
    }
  }
}

}  // namespace fftune
