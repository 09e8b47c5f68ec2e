// A bias and GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415) in one pass: y = act(x + bias).
//
// The backward pass recomputes x + bias, so that the forward pass saves x alone, unless it saves
// that sum: dx = dy ⊙ act'(x + bias), and dbias is the sum over tokens of the unrounded dx.
#pragma once

#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in bias_gelu.cpp; listed in kernels/catalog.cpp.
const Op& bias_gelu_op();

namespace bias_gelu {

/// Whether the forward pass writes `input`, x + bias rounded, which the backward pass then reads
/// instead of both.
bool saves_input(const Problem& problem);

DType bias_dtype(const Problem& problem);

std::vector<const Family*> cuda_families(), cpu_families();

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace bias_gelu
}  // namespace fftune
