// The activations of gated layers on the host: their names, and their definitions with derivatives.
//
// To add one: an enumerator, a struct and its place in `activations::All` here, and the struct of
// that name with its enumerator for the GPU in activation.cuh. Options, reference, CPU loops and
// kernels take it from there.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace fftune {

enum class Activation { silu, gelu, gelu_tanh, relu, none, swiglu_oai };

/// "silu", "gelu", "gelu-tanh", "relu", "none": the first is the usual default.
std::vector<std::string> activation_names();
/// Those, and the ones that limit up too: "swiglu-oai".
std::vector<std::string> gated_activation_names();
/// Throws Error(invalid_input) for another name.
Activation parse_activation(std::string_view name);
/// The type that device code has for it: "fftune::gelu_tanh", of common/activation.cuh.
std::string activation_type(Activation activation);

/// The factor of the activated gate, in float64: up, limited where the activation limits it.
double up_factor(Activation activation, double up);
/// Whether the activation limits up, which then has no gradient; PyTorch's clamp has none at NaN.
bool limits_up(Activation activation, double up);
/// The value in float64, and the gradient: d times the derivative at `value`.
double activate(Activation activation, double value);
double activation_gradient(Activation activation, double value, double d);

/// The definitions, each over an arithmetic `Math`, so that the reference in float64 and the
/// vectorised loops (cpu_activation.inc) have one formula. NaN and infinities give what PyTorch's
/// activations give: x · 0 is NaN where x is infinite. Math has
///
///   Value, Scalar      what it computes with, and its constants' type: Value * Scalar is a Value
///   sigmoid(x)         1 / (1 + e^-x)
///   normal(x)          Φ(x), of the normal distribution
///   normal_density(x)  φ(x) = e^(-x²/2) / √(2π)
///   within(x, end)     x limited to ±end; NaN stays
///
/// for every x. Where one of them is negligible it is exactly 0, as it is at an infinity.
namespace activations {

template <class Math>
struct ValueAndSlope {
  typename Math::Value value, slope;
};

template <class Math>
struct Silu {  // x / (1 + e^-x)
  static constexpr std::string_view name = "silu", device_type = "silu";
  static ValueAndSlope<Math> at(typename Math::Value x) {
    const auto s = Math::sigmoid(x);
    const auto value = x * s;
    return {value, s + value * (1 - s)};
  }
};

template <class Math>
struct Gelu {  // x Φ(x), Hendrycks and Gimpel 2016, arXiv 1606.08415
  static constexpr std::string_view name = "gelu", device_type = "gelu";
  static ValueAndSlope<Math> at(typename Math::Value x) {
    const auto normal = Math::normal(x);
    return {x * normal, normal + x * Math::normal_density(x)};
  }
};

template <class Math>
struct GeluTanh {  // x/2 (1 + tanh u) = x sigmoid(2u), u = √(2/π) (x + 0.044715 x³)
  static constexpr std::string_view name = "gelu-tanh", device_type = "gelu_tanh";
  static ValueAndSlope<Math> at(typename Math::Value x) {
    constexpr auto linear = static_cast<typename Math::Scalar>(1.5957691216057307118);
    constexpr auto cubic = static_cast<typename Math::Scalar>(0.0713548162726002527);
    const auto near =
        Math::within(x, 1e4f);  // beyond it the sigmoid is 0 or 1, and x² may overflow
    const auto square = near * near;
    const auto s = Math::sigmoid(near * (linear + cubic * square));
    const auto value = x * s;
    return {value, s + value * (1 - s) * (linear + 3 * cubic * square)};
  }
};

template <class Math>
struct Relu {  // max(x, 0); its derivative is 0 at 0, and 1 at NaN
  static constexpr std::string_view name = "relu", device_type = "relu";
  static ValueAndSlope<Math> at(typename Math::Value x) {
    constexpr typename Math::Value zero{};
    return {x <= zero ? zero : x, x <= zero ? zero : zero + 1};
  }
  static auto passes(typename Math::Value x) { return (x > typename Math::Value{}) | (x != x); }
};

template <class Math>
struct None {
  static constexpr std::string_view name = "none", device_type = "none";
  static ValueAndSlope<Math> at(typename Math::Value x) { return {x, typename Math::Value{} + 1}; }
};

// Activation of gpt-oss: gate sigmoid(1.702 gate) with gate up to 7, times up + 1 with up from -7
// to 7.
template <class Math>
struct SwigluOai {
  static constexpr std::string_view name = "swiglu-oai", device_type = "swiglu_oai";
  static constexpr typename Math::Scalar limit = 7;
  static ValueAndSlope<Math> at(typename Math::Value x) {
    constexpr auto alpha = static_cast<typename Math::Scalar>(1.702);
    constexpr typename Math::Value zero{};
    const auto near = x > zero + limit ? zero + limit : x;
    const auto s = Math::sigmoid(near * alpha);
    const auto value = near * s;
    return {value, x <= zero + limit ? s + value * (1 - s) * alpha : zero};
  }
  static auto passes(typename Math::Value x) { return x <= typename Math::Value{} + limit; }
  static typename Math::Value up_factor(typename Math::Value up) {
    constexpr typename Math::Value zero{};
    up = up > zero + limit ? zero + limit : up;
    return 1 + (up < zero - limit ? zero - limit : up);
  }
};

/// In the order of the enumeration.
template <class Math>
using All =
    std::tuple<Silu<Math>, Gelu<Math>, GeluTanh<Math>, Relu<Math>, None<Math>, SwigluOai<Math>>;

/// The factor of the activated gate.
template <class Definition, class Value>
Value up_factor(Value up) {
  if constexpr (requires { Definition::up_factor(up); })
    return Definition::up_factor(up);
  else
    return up;
}

/// d times the derivative, `slope`, at x. An activation that cuts its argument off selects, as
/// PyTorch does: where passes(x) is false the result is 0, whatever d is.
template <class Definition, class Value>
Value gradient(Value x, Value d, Value slope) {
  if constexpr (requires { Definition::passes(x); })
    return Definition::passes(x) ? d * slope : Value{};
  else
    return d * slope;
}

}  // namespace activations

/// Calls body with the activation's definition, an object of its type.
template <class Math, class Body>
void with_activation(Activation activation, const Body& body) {
  using All = activations::All<Math>;
  [&]<std::size_t... i>(std::index_sequence<i...>) {
    ((static_cast<std::size_t>(activation) == i ? body(std::tuple_element_t<i, All>{}) : void()),
     ...);
  }
  (std::make_index_sequence<std::tuple_size_v<All>>{});
}

}  // namespace fftune
