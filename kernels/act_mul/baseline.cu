// act-mul as an unfused sequence of kernels, the baseline of `bench`. Tensors as in forward_columns
// and backward_columns; others are [m, h]. Block: 256. Grid: (ceil(h / 1024), min(m, 65535)).
#include "common/activation.cuh"
#include "common/numerics.cuh"
#include "common/vectors.cuh"

namespace fftune {

// Calls body(index in [m, h], index of gate, index of up) for each of this thread's elements.
template <bool packed, class Body>
__device__ __forceinline__ void for_gates(i64 m, i64 h, const Body& body) {
  for_elements(m, h, [&](i64 row, i64 column) {
    const i64 gate = row * (packed ? 2 * h : h) + column;
    body(row * h + column, gate, packed ? gate + h : gate);
  });
}

template <class T, class Activation, bool packed>
__global__ void __launch_bounds__(256)
    baseline_activate(const T* gate, T* activated, i64 m, i64 h) {
  for_gates<packed>(m, h, [&](i64 i, i64 at, i64) {
    activated[i] = from_float<T>(Activation::value(to_float(gate[at])));
  });
}

template <class T, class Activation, bool packed>
__global__ void __launch_bounds__(256)
    baseline_multiply(const T* factor, const T* up, T* product, i64 m, i64 h) {
  for_gates<packed>(m, h, [&](i64 i, i64, i64 at) {
    product[i] = from_float<T>(to_float(factor[i]) * to_float(up[at]));
  });
}

template <class T, class Activation, bool packed>
__global__ void __launch_bounds__(256)
    baseline_up_gradient(const T* activated, const T* dout, T* dup, i64 m, i64 h) {
  for_gates<packed>(m, h, [&](i64 i, i64, i64 at) {
    dup[at] = from_float<T>(to_float(activated[i]) * to_float(dout[i]));
  });
}

template <class T, class Activation, bool packed>
__global__ void __launch_bounds__(256)
    baseline_gate_gradient(const T* gate, const T* product, T* dgate, i64 m, i64 h) {
  for_gates<packed>(m, h, [&](i64 i, i64 at, i64) {
    float value, slope;
    const float input = to_float(gate[at]);
    Activation::value_and_slope(input, value, slope);
    dgate[at] = from_float<T>(activation_gradient<Activation>(input, to_float(product[i]), slope));
  });
}

}  // namespace fftune
