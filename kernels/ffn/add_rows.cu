// y += bias + residual, as a pipeline of library products needs it after its last GEMM: what
// `bench` compares with.
//
// y and residual are [rows, columns], row-major, bias [columns]; either may be null. A thread takes
// 16 bytes of each; where rows are not 16-byte aligned, the same elements one by one.
// Grid: (ceil(columns / elements of a thread / 256), min(rows, 65535)). Block: 256 threads.
#include "common/float16.cuh"
#include "common/vector.cuh"

namespace fftune {

template <class T>
__global__ void __launch_bounds__(256)
    add_rows(T* y, const T* bias, const T* residual, i64 rows, i64 columns) {
  constexpr int elements = 16 / sizeof(T);
  const i64 column = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * elements;
  const auto sum = [](T value, T first, T second) {
    return from_float<T>(to_float(value) + to_float(first) + to_float(second));
  };
  for (i64 row = blockIdx.y; row < rows && column < columns; row += gridDim.y) {
    const i64 at = row * columns + column;
    if (columns % elements == 0) {
      vector16 values = load_dependent(y + at);
      const vector16 first = bias != nullptr ? load_cached(bias + column) : vector16{};
      const vector16 second = residual != nullptr ? load_cached(residual + at) : vector16{};
      T* const value = reinterpret_cast<T*>(&values);
#pragma unroll
      for (int i = 0; i < elements; ++i) {
        value[i] = sum(value[i], reinterpret_cast<const T*>(&first)[i],
                       reinterpret_cast<const T*>(&second)[i]);
      }
      store(y + at, values);
    } else {
      for (int i = 0; i < elements && column + i < columns; ++i) {
        y[at + i] = sum(y[at + i], bias != nullptr ? bias[column + i] : T{},
                        residual != nullptr ? residual[at + i] : T{});
      }
    }
  }
}

}  // namespace fftune
