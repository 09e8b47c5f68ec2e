#include "kernels/common/activation.hpp"

#include <fmt/format.h>

#include <cmath>

#include "core/error.hpp"

namespace fftune {

std::vector<std::string> activation_names() {
  return {"silu", "gelu", "gelu-tanh", "relu", "none"};
}

Activation parse_activation(std::string_view name) {
  const auto names = activation_names();
  for (std::size_t i = 0; i < names.size(); ++i)
    if (names[i] == name) return static_cast<Activation>(i);
  throw Error(ErrorKind::invalid_input,
              fmt::format("unknown activation '{}': use {}", name, fmt::join(names, ", ")));
}

double activate(Activation activation, double value) {
  constexpr double sqrt_half = 0.70710678118654752440;
  constexpr double sqrt_two_over_pi = 0.79788456080286535588;
  switch (activation) {
    case Activation::silu:
      return value / (1 + std::exp(-value));
    case Activation::gelu:
      // erfc keeps the digits that 1 + erf loses where erf is near -1.
      return 0.5 * value * std::erfc(-value * sqrt_half);
    case Activation::gelu_tanh:
      return 0.5 * value *
             (1 + std::tanh(sqrt_two_over_pi * (value + 0.044715 * value * value * value)));
    case Activation::relu:
      return value > 0 ? value : 0;
    case Activation::none:
      return value;
  }
  throw Error(ErrorKind::internal, "activate: a value outside the enumeration");
}

}  // namespace fftune
