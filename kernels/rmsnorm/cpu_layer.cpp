#include "kernels/rmsnorm/cpu_layer.hpp"

#include <cmath>
#include <span>

namespace fftune::rmsnorm {

std::size_t factor_bytes(const Layer& layer) {
  const bool ready = layer.weight_dtype == DType::f32 && layer.convention != Convention::gemma;
  return ready ? 0 : static_cast<std::size_t>(layer.d) * sizeof(float);
}

const float* factors_of(const Layer& layer, const void* w, float* factors) {
  if (factor_bytes(layer) == 0) return static_cast<const float*>(w);
  const std::span<float> values(factors, static_cast<std::size_t>(layer.d));
  decode(layer.weight_dtype, w, values);
  if (layer.convention == Convention::gemma)
    for (float& value : values) value += 1;
  return factors;
}

float reciprocal_deviation(const Layer& layer, float squares) {
  return 1 / std::sqrt(squares / static_cast<float>(layer.d) + layer.eps);
}

}  // namespace fftune::rmsnorm
