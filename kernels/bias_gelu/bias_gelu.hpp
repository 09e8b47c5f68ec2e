// A bias and GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415) in one pass: y = act(x + bias).
//
// The backward pass recomputes x + bias, so that the forward pass saves x alone, unless it saves
// that sum: dx = dy ⊙ act'(x + bias), and dbias is the sum over tokens of the unrounded dx.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/activation.hpp"
#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in bias_gelu.cpp; listed in kernels/catalog.cpp.
const Op& bias_gelu_op();

namespace bias_gelu {

constexpr const char* stage_forward = "forward";
constexpr const char* stage_backward = "backward";

/// The places of the tensors. Forward: x, bias, y, and input if it is saved. Backward: x, bias, dy,
/// dx, dbias, or input, dy, dx, dbias.
struct Places {
  std::size_t x = absent;      // [m, h]
  std::size_t bias = absent;   // [h]
  std::size_t y = absent;      // [m, h]
  std::size_t input = absent;  // [m, h]: x + bias, rounded
  std::size_t dy = absent;     // [m, h]
  std::size_t dx = absent;     // [m, h]
  std::size_t dbias = absent;  // [h]
  std::size_t count = 0;
};
Places places_of(const Problem& problem);

/// Whether the forward pass writes x + bias, which the backward pass then reads instead of both.
bool saves_input(const Problem& problem);

DType bias_dtype(const Problem& problem);

std::vector<const Family*> cuda_families();
std::vector<const Family*> cpu_families();

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace bias_gelu
}  // namespace fftune
