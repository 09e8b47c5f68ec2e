// out = act(gate) * up, as a pipeline of library products needs it between its GEMMs: what `bench`
// compares with.
//
// gate, up and out are [rows, columns], row-major; without up, gate is one packed [rows, 2 columns]
// product whose second half of every row is up. A thread takes 16 bytes of each; where rows are not
// 16-byte aligned, the same elements one by one.
// Grid: (ceil(columns / elements of a thread / 256), min(rows, 65535)). Block: 256 threads.
#include "common/activation.cuh"
#include "common/float8.cuh"
#include "common/vector.cuh"

namespace fftune {

template <class T, class Out, class Activation>
__device__ __forceinline__ Out activate_multiply(T gate, T up, float factor) {
  return from_float<Out>(Activation::value(to_float(gate)) * to_float(up) * factor);
}

// out in units of 1 / factor.
template <class T, class Out, class Activation>
__device__ __forceinline__ void silu_mul_rows(const T* gate, const T* up, Out* out, float factor,
                                              i64 rows, i64 columns) {
  constexpr int elements = 16 / sizeof(T);
  struct alignas(sizeof(Out) * elements) outputs {
    Out value[elements];
  };
  const i64 column = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * elements;
  const i64 stride = up != nullptr ? columns : 2 * columns;
  const T* const second = up != nullptr ? up : gate + columns;
  for (i64 row = blockIdx.y; row < rows && column < columns; row += gridDim.y) {
    const T* const gates = gate + row * stride + column;
    const T* const ups = second + row * stride + column;
    Out* const results = out + row * columns + column;
    if (columns % elements == 0) {
      const vector16 gate_vector = load_cached(gates);
      const vector16 up_vector = load_cached(ups);
      outputs result;
#pragma unroll
      for (int i = 0; i < elements; ++i) {
        result.value[i] = activate_multiply<T, Out, Activation>(
            reinterpret_cast<const T*>(&gate_vector)[i], reinterpret_cast<const T*>(&up_vector)[i],
            factor);
      }
      *reinterpret_cast<outputs*>(results) = result;
    } else {
      for (int i = 0; i < elements && column + i < columns; ++i) {
        results[i] = activate_multiply<T, Out, Activation>(gates[i], ups[i], factor);
      }
    }
  }
}

template <class T, class Activation>
__global__ void __launch_bounds__(256)
    silu_mul(const T* gate, const T* up, T* out, i64 rows, i64 columns) {
  silu_mul_rows<T, T, Activation>(gate, up, out, 1, rows, columns);
}

// The same from bf16 to fp8, whose scale is given.
template <class Activation>
__global__ void __launch_bounds__(256) silu_mul_fp8(const bf16* gate, const bf16* up, fp8* out,
                                                    const float* out_scale, i64 rows, i64 columns) {
  silu_mul_rows<bf16, fp8, Activation>(gate, up, out, 1 / *out_scale, rows, columns);
}

}  // namespace fftune
