// Kernels that a pipeline of library products needs between and after its GEMMs, for comparison in
// `bench`.
//
// Matrices are [rows, columns], row-major. A thread takes 16 bytes of each; where rows are not
// 16-byte aligned, the same elements one by one.
// Grid: (ceil(columns / elements of a thread / 256), min(rows, 65535)), of gate_gradient: see
// there. Block: 256 threads.
#include "common/activation.cuh"
#include "common/numerics.cuh"
#include "common/vectors.cuh"

namespace fftune {

template <class T, class Out, class Activation>
__device__ __forceinline__ Out activate_multiply(T gate, T up, float factor) {
  return from_float<Out>(Activation::value(to_float(gate)) * to_float(up) * factor);
}

// out = act(gate) * up. Without up, gate is one packed [rows, 2 columns] product whose second half
// of every row is up. out in units of 1 / factor.
template <class T, class Out, class Activation>
__device__ __forceinline__ void act_mul_rows(const T* gate, const T* up, Out* out, float factor,
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
    act_mul(const T* gate, const T* up, T* out, i64 rows, i64 columns) {
  act_mul_rows<T, T, Activation>(gate, up, out, 1, rows, columns);
}

// The same from bf16 to fp8, whose scale is given.
template <class Activation>
__global__ void __launch_bounds__(256) act_mul_fp8(const bf16* gate, const bf16* up, fp8* out,
                                                   const float* out_scale, i64 rows, i64 columns) {
  act_mul_rows<bf16, fp8, Activation>(gate, up, out, 1 / *out_scale, rows, columns);
}

// y += bias + residual, bias [columns]; either may be null.
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

// d_gate = dc * up * act'(gate), d_up = dc * act(gate), hidden = act(gate) * up, all [elements]. A
// thread takes `count` of them. Grid: ceil(elements / (256 count)).
template <class T, class Activation, int count>
__global__ void __launch_bounds__(256) gate_gradient(const T* dc, const T* gate, const T* up,
                                                     T* d_gate, T* d_up, T* hidden, i64 elements) {
  const i64 at = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * count;
  if (at >= elements) return;
  const u64 policy = l2_eviction_policy<false>();
  const auto gradients = load_once<T, count>(dc + at, true, policy);
  const auto gates = load_once<T, count>(gate + at, true, policy);
  const auto ups = load_once<T, count>(up + at, true, policy);
  float gradient[count], value[count], factor[count], product[count];
  to_floats(gradients, gradient);
  to_floats(gates, value);
  to_floats(ups, factor);
#pragma unroll
  for (int e = 0; e < count; ++e) {
    float activated, slope;
    Activation::value_and_slope(value[e], activated, slope);
    value[e] = activation_gradient<Activation>(value[e], gradient[e] * factor[e], slope);
    product[e] = activated * factor[e];
    factor[e] = gradient[e] * activated;
  }
  store_once(d_gate + at, from_floats<T>(value), policy);
  store_once(d_up + at, from_floats<T>(factor), policy);
  store_once(hidden + at, from_floats<T>(product), policy);
}

}  // namespace fftune
