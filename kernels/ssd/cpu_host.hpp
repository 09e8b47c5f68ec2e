// The tensors of a call of ssd on the CPU, as floats.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/op_parts.hpp"
#include "kernels/ssd/ssd.hpp"

namespace fftune::ssd {

/// Infinities of steps and of results are NaN (reference.cpp).
inline float number(float value) {
  return value + 0 * value;
}

class Host {
 public:
  Host(const Problem& problem, const HostCall& call)
      : layer(layer_of(problem)), call_(call), places_(ssd_op().tensors(problem)) {}

  const Layer layer;

  Tokens tokens(std::int64_t sequence) const {
    return tokens_of(layer, layer.packed ? data<std::int32_t>("offsets") : nullptr, sequence);
  }
  /// The place of a sequence's state in its tensor; -1 for padding.
  std::int64_t state_place(std::int64_t sequence) const {
    if (!layer.indices) return sequence * layer.state_elements();
    const std::int64_t entry = data<std::int32_t>("state_indices")[sequence];
    return entry <= layer.null_index || entry >= layer.states ? -1 : entry * layer.state_block;
  }
  /// The tensor that a sequence begins with; null for zeros.
  const char* first_state(std::int64_t sequence) const {
    if (layer.has_state && data<std::uint8_t>("has_state")[sequence] == 0) return nullptr;
    return layer.indices ? "states" : layer.initial ? "initial_state" : nullptr;
  }
  const char* last_state() const {
    return layer.indices ? "states" : layer.final ? "final_state" : nullptr;
  }

  template <typename Value>
  Value* data(const char* name) const {
    return static_cast<Value*>(address_of(call_, places_.at(name)));
  }
  void read(const char* name, DType dtype, std::int64_t place, std::span<float> values) const {
    decode(dtype, element(name, dtype, place), values);
  }
  void write(const char* name, DType dtype, std::int64_t place,
             std::span<const float> values) const {
    encode(dtype, values, element(name, dtype, place));
  }

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

 private:
  std::byte* element(const char* name, DType dtype, std::int64_t place) const {
    return data<std::byte>(name) + static_cast<std::size_t>(place) * dtype_bytes(dtype);
  }

  const HostCall& call_;
  TensorPlaces places_;
};

/// Chunks of 64 tokens (cpu_chunks.cpp).
Program chunk_program(const Problem& problem, const DeviceFacts& facts, const Config& config);
Program chunk_backward_program(const Problem& problem, const DeviceFacts& facts,
                               const Config& config);

}  // namespace fftune::ssd
