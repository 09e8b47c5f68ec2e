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

double activation_slope(Activation activation, double value) {
  constexpr double sqrt_half = 0.70710678118654752440;
  constexpr double sqrt_two_over_pi = 0.79788456080286535588;
  constexpr double reciprocal_sqrt_two_pi = 0.39894228040143267794;
  switch (activation) {
    case Activation::silu: {
      const double sigmoid = 1 / (1 + std::exp(-value));
      return sigmoid * (1 + value * (1 - sigmoid));
    }
    case Activation::gelu:
      return 0.5 * std::erfc(-value * sqrt_half) +
             value * reciprocal_sqrt_two_pi * std::exp(-0.5 * value * value);
    case Activation::gelu_tanh: {
      const double square = value * value;
      const double tanh = std::tanh(sqrt_two_over_pi * value * (1 + 0.044715 * square));
      const double inner_slope = sqrt_two_over_pi * (1 + 3 * 0.044715 * square);
      return 0.5 * (1 + tanh) + 0.5 * value * (1 - tanh * tanh) * inner_slope;
    }
    case Activation::relu:
      return value > 0 ? 1 : 0;
    case Activation::none:
      return 1;
  }
  throw Error(ErrorKind::internal, "activation_slope: a value outside the enumeration");
}

}  // namespace fftune
