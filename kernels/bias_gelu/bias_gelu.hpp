// A bias and GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415) in one pass: y = act(x + bias).
//
// The backward pass computes x + bias again, so that of the forward pass x alone is kept:
// dx = dy ⊙ act'(x + bias), and dbias is the sum over tokens of dx before it is rounded.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/activation.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in bias_gelu.cpp; listed in kernels/catalog.cpp.
const Op& bias_gelu_op();

namespace bias_gelu {

constexpr const char* stage_forward = "forward";
constexpr const char* stage_backward = "backward";

/// The places of the tensors. Forward: x, bias, y; backward: x, bias, dy, dx, dbias.
namespace tensor {
constexpr std::size_t x = 0;      // [m, h]
constexpr std::size_t bias = 1;   // [h]
constexpr std::size_t y = 2;      // [m, h]
constexpr std::size_t dy = 2;     // [m, h]
constexpr std::size_t dx = 3;     // [m, h]
constexpr std::size_t dbias = 4;  // [h]
constexpr std::size_t forward_count = 3;
constexpr std::size_t backward_count = 5;
}  // namespace tensor

DType bias_dtype(const Problem& problem);

const Family& forward_columns_family();
const Family& backward_columns_family();
const Family& forward_fallback_family();
const Family& backward_fallback_family();
const Family& cpu_forward_family();
const Family& cpu_backward_family();

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace bias_gelu
}  // namespace fftune
