// out = act(gate) * up, as a pipeline of library products needs it between its GEMMs: what `bench`
// compares with.
//
// gate, up and out are [rows, columns], row-major; without up, gate is one packed [rows, 2 columns]
// product whose second half of every row is up. A thread takes 16 bytes of each; where rows are not
// 16-byte aligned, the same elements one by one.
// Grid: (ceil(columns / elements of a thread / 256), min(rows, 65535)). Block: 256 threads.
#include "common/activation.cuh"
#include "common/vector.cuh"

namespace fftune {

template <class T, class Activation>
__device__ __forceinline__ T activate_multiply(T gate, T up) {
  return from_float<T>(Activation::apply(to_float(gate)) * to_float(up));
}

template <class T, class Activation>
__global__ void __launch_bounds__(256)
    silu_mul(const T* gate, const T* up, T* out, i64 rows, i64 columns) {
  constexpr int elements = 16 / sizeof(T);
  const i64 column = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * elements;
  const i64 stride = up != nullptr ? columns : 2 * columns;
  const T* const second = up != nullptr ? up : gate + columns;
  for (i64 row = blockIdx.y; row < rows && column < columns; row += gridDim.y) {
    const T* const gates = gate + row * stride + column;
    const T* const ups = second + row * stride + column;
    T* const results = out + row * columns + column;
    if (columns % elements == 0) {
      const vector16 gate_vector = load_cached(gates);
      const vector16 up_vector = load_cached(ups);
      vector16 result_vector;
#pragma unroll
      for (int i = 0; i < elements; ++i) {
        reinterpret_cast<T*>(&result_vector)[i] = activate_multiply<T, Activation>(
            reinterpret_cast<const T*>(&gate_vector)[i], reinterpret_cast<const T*>(&up_vector)[i]);
      }
      store(results, result_vector);
    } else {
      for (int i = 0; i < elements && column + i < columns; ++i) {
        results[i] = activate_multiply<T, Activation>(gates[i], ups[i]);
      }
    }
  }
}

}  // namespace fftune
