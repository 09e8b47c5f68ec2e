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

/// What the activated gate is multiplied by, in float64: up, but for activations that limit it.
double up_factor(Activation activation, double up);
/// The value in float64, and the derivative.
double activate(Activation activation, double value);
double activation_slope(Activation activation, double value);

/// The definitions, each over an arithmetic `Math`, so that the reference in float64 and the
/// vectorised loops (cpu_activation.inc) have one formula. Math has
///
///   Value, Scalar      what it computes with, and its constants' type: Value * Scalar is a Value
///   sigmoid(x)         1 / (1 + e^-x)
///   normal(x)          Φ(x), of the normal distribution
///   normal_density(x)  φ(x) = e^(-x²/2) / √(2π)
///   at_least(x, end), at_most(x, end)
///                      the larger or smaller of the two where the functions above hold only up to
///                      `end`; where they hold everywhere, x
namespace activations {

template <class Math>
struct ValueAndSlope {
  typename Math::Value value, slope;
};

template <class Math>
struct Silu {  // x / (1 + e^-x)
  static constexpr std::string_view name = "silu", device_type = "silu";
  static ValueAndSlope<Math> at(typename Math::Value x) {
    constexpr typename Math::Scalar end = 86;  // beyond it the sigmoid is 0 or 1 to 1e-37
    x = Math::at_least(x, -end);
    const auto s = Math::sigmoid(Math::at_most(x, end));
    const auto value = x * s;
    return {value, s + value * (1 - s)};
  }
};

template <class Math>
struct Gelu {  // x Φ(x), Hendrycks and Gimpel 2016, arXiv 1606.08415
  static constexpr std::string_view name = "gelu", device_type = "gelu";
  static ValueAndSlope<Math> at(typename Math::Value x) {
    constexpr typename Math::Scalar end = 5.5;  // beyond it gelu is 0 or x to 1e-7
    x = Math::at_least(x, -end);
    const auto near = Math::at_most(x, end);
    const auto normal = Math::normal(near);
    return {x * normal, normal + near * Math::normal_density(near)};
  }
};

template <class Math>
struct GeluTanh {  // x/2 (1 + tanh u) = x sigmoid(2u), u = √(2/π) (x + 0.044715 x³)
  static constexpr std::string_view name = "gelu-tanh", device_type = "gelu_tanh";
  static ValueAndSlope<Math> at(typename Math::Value x) {
    constexpr typename Math::Scalar end = static_cast<typename Math::Scalar>(9.9);
    constexpr auto linear = static_cast<typename Math::Scalar>(1.5957691216057307118);
    constexpr auto cubic = static_cast<typename Math::Scalar>(0.0713548162726002527);
    x = Math::at_least(x, -end);
    const auto near = Math::at_most(x, end), square = near * near;
    const auto s = Math::sigmoid(near * (linear + cubic * square));
    const auto value = x * s;
    return {value, s + value * (1 - s) * (linear + 3 * cubic * square)};
  }
};

template <class Math>
struct Relu {  // max(x, 0); its derivative at 0 is 0
  static constexpr std::string_view name = "relu", device_type = "relu";
  static ValueAndSlope<Math> at(typename Math::Value x) {
    constexpr typename Math::Value zero{};
    return {x > zero ? x : zero, x > zero ? zero + 1 : zero};
  }
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
    constexpr typename Math::Scalar end = 50;  // beyond it the sigmoid is 0 to 1e-37
    constexpr typename Math::Value zero{};
    x = Math::at_least(x, -end);
    const auto near = x > zero + limit ? zero + limit : x;
    const auto s = Math::sigmoid(near * alpha);
    const auto value = near * s;
    return {value, x > zero + limit ? zero : s + value * (1 - s) * alpha};
  }
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
