// d_gate = dc * up * act'(gate), d_up = dc * act(gate), hidden = act(gate) * up, as a pipeline of
// library products needs it between its GEMMs: what `bench` compares with.
//
// All are [elements]. A thread takes `count` of them. Grid: ceil(elements / (256 count)). Block:
// 256.
#include "common/activation.cuh"
#include "common/packet.cuh"

namespace fftune {

template <class T, class Activation, int count>
__global__ void __launch_bounds__(256) gate_gradient(const T* dc, const T* gate, const T* up,
                                                     T* d_gate, T* d_up, T* hidden, i64 elements) {
  const i64 at = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * count;
  if (at >= elements) return;
  const u64 policy = stream_policy<false>();
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
    value[e] = gradient[e] * factor[e] * slope;
    product[e] = activated * factor[e];
    factor[e] = gradient[e] * activated;
  }
  store_once(d_gate + at, from_floats<T>(value), policy);
  store_once(d_up + at, from_floats<T>(factor), policy);
  store_once(hidden + at, from_floats<T>(product), policy);
}

}  // namespace fftune
