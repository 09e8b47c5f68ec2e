// Rows of one of two matrices by a mask, as a pipeline of library products needs it after both
// experts have seen every token: what `bench` compares with.
//
// out_i = first_i where mask[i] is not zero, else second_i; all are [rows, columns], row-major, and
// out may be one of the others. A thread takes 16 bytes; where rows are not 16-byte aligned, the
// same elements one by one.
// Grid: (ceil(columns / elements of a thread / 256), min(rows, 65535)). Block: 256 threads.
#include "common/float16.cuh"
#include "common/vector.cuh"

namespace fftune {

template <class T>
__global__ void __launch_bounds__(256)
    select_rows(const u8* mask, const T* first, const T* second, T* out, i64 rows, i64 columns) {
  constexpr int elements = 16 / sizeof(T);
  const i64 column = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * elements;
  for (i64 row = blockIdx.y; row < rows && column < columns; row += gridDim.y) {
    const T* const from = (mask[row] != 0 ? first : second) + row * columns + column;
    T* const to = out + row * columns + column;
    if (columns % elements == 0) {
      store(to, load_dependent(from));
    } else {
      for (int i = 0; i < elements && column + i < columns; ++i) to[i] = from[i];
    }
  }
}

}  // namespace fftune
