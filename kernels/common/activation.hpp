// The activations of gated layers, on the host.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fftune {

enum class Activation { silu, gelu, gelu_tanh, relu, none };

/// "silu", "gelu", "gelu-tanh", "relu", "none": the first is the usual default.
std::vector<std::string> activation_names();
/// Throws Error(invalid_input) for another name.
Activation parse_activation(std::string_view name);

/// The definitions, in float64:
/// silu x/(1+e^-x); gelu x/2 (1+erf(x/√2)); gelu-tanh x/2 (1+tanh(√(2/π)(x+0.044715x³)))
/// (Hendrycks and Gimpel 2016, arXiv 1606.08415); relu max(x,0); none x.
double activate(Activation activation, double value);

/// Its derivative; of relu at 0 it is 0.
double activation_slope(Activation activation, double value);

}  // namespace fftune
