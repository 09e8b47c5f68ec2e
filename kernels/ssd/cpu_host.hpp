// The tensors of a call of ssd on the CPU, as floats.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/gated_delta_rule/cpu_states.hpp"
#include "kernels/ssd/ssd.hpp"

namespace fftune::ssd {

/// Infinities of steps and of results are NaN (reference.cpp).
inline float number(float value) {
  return value + 0 * value;
}

class Host : public gated_delta_rule::HostStates<Layer> {
 public:
  Host(const Problem& problem, const HostCall& call)
      : HostStates(layer_of(problem), call, TensorPlaces(ssd_op().tensors(problem))) {}

  /// A head's parameters.
  struct Head {
    float A = 0, bias = 0, D = 0;
  };
  Head head(std::int64_t j) const {
    return {layer.given ? data<float>("A")[j] : -std::exp(data<float>("A_log")[j]),
            layer.bias ? data<float>("dt_bias")[j] : 0, layer.skip ? data<float>("D")[j] : 0};
  }
  /// A token's step, and its slope: the derivative by the input.
  struct Step {
    float dt = 0, slope = 0;
  };
  Step step(std::int64_t t, std::int64_t j, const Head& head) const {
    float x = 0;
    read("dt", layer.dtype, t * layer.gate_row + j, {&x, 1});
    x += head.bias;
    Step step{x, 1};
    if (layer.softplus) {
      const float tail = std::exp(-std::abs(x));
      step.dt = (x > 0 ? x : x < 0 ? 0 : x) + std::log1p(tail);
      step.slope = (x > 0 ? 1 : tail) / (1 + tail);
    }
    if (step.dt < layer.dt_min) step = {layer.dt_min, 0};
    if (step.dt > layer.dt_max) step = {layer.dt_max, 0};
    step.dt = number(step.dt);
    return step;
  }
};

/// Chunks of 64 tokens (cpu_chunks.cpp).
Program chunk_program(const Problem& problem, const DeviceFacts& facts, const Config& config);
Program chunk_backward_program(const Problem& problem, const DeviceFacts& facts,
                               const Config& config);

}  // namespace fftune::ssd
