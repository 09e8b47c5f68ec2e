#include "kernels/common/activation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/error.hpp"

namespace fftune {
namespace {

struct DoubleMath {
  using Value = double;
  using Scalar = double;

  static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
  static double normal(double x) {
    // erfc keeps the digits that 1 + erf loses where erf is near -1.
    return 0.5 * std::erfc(x * -0.70710678118654752440);
  }
  static double normal_density(double x) { return 0.39894228040143267794 * std::exp(-0.5 * x * x); }
  static double within(double x, double end) { return std::clamp(x, -end, end); }
};

}  // namespace

std::vector<std::string> activation_names() {
  auto names = gated_activation_names();
  std::erase(names, activations::SwigluOai<DoubleMath>::name);
  return names;
}

std::vector<std::string> gated_activation_names() {
  return std::apply(
      [](auto... each) { return std::vector<std::string>{std::string(decltype(each)::name)...}; },
      activations::All<DoubleMath>{});
}

Activation parse_activation(std::string_view name) {
  const auto names = gated_activation_names();
  for (std::size_t i = 0; i < names.size(); ++i)
    if (names[i] == name) return static_cast<Activation>(i);
  throw Error(ErrorKind::invalid_input,
              fmt::format("unknown activation '{}': use {}", name, fmt::join(names, ", ")));
}

std::string activation_type(Activation activation) {
  std::string type;
  with_activation<DoubleMath>(activation, [&](auto definition) {
    type = fmt::format("fftune::{}", decltype(definition)::device_type);
  });
  return type;
}

double up_factor(Activation activation, double up) {
  with_activation<DoubleMath>(
      activation, [&](auto definition) { up = activations::up_factor<decltype(definition)>(up); });
  return up;
}

bool limits_up(Activation activation, double up) {
  bool limits = false;
  with_activation<DoubleMath>(activation, [&](auto definition) {
    if constexpr (requires { decltype(definition)::up_factor(up); })
      limits = !(std::abs(up) <= decltype(definition)::limit);
  });
  return limits;
}

double activate(Activation activation, double value) {
  double result = 0;
  with_activation<DoubleMath>(activation,
                              [&](auto definition) { result = definition.at(value).value; });
  return result;
}

double activation_gradient(Activation activation, double value, double d) {
  with_activation<DoubleMath>(activation, [&](auto definition) {
    d = activations::gradient<decltype(definition)>(value, d, definition.at(value).slope);
  });
  return d;
}

}  // namespace fftune
