// Root mean square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467):
// y = x̂ ⊙ factor(w), x̂ = x / sqrt(mean(x²) + eps), the mean over a row of d features.
//
// Conventions: llama rounds x̂ to the dtype before it multiplies, and factor(w) = w; gemma rounds
// nothing on the way, and factor(w) = 1 + w; t5 rounds nothing either, and factor(w) = w.
//
// With the residual added, sum = x + residual rounded to the dtype is written too and is what is
// normalised. The backward pass then takes that sum in the place of x, and the gradient of the sum
// that comes from beyond the layer: dx = dx of the norm + dsum is the gradient of both x and
// residual. dw = the sum over rows of dy ⊙ x̂. Rounding counts as the identity: where the forward
// pass rounds x̂, its gradient is taken, and multiplied, as if it had not.
//
// residual=after adds the residual to what the norm gives instead, before the one rounding, as
// Gemma 2's norms behind attention and the feed-forward network have it: y = residual + x̂ ⊙
// factor(w). It is of the forward pass.
//
// Where the output is quantised, y = q scale with a scale for each token: q is y / scale rounded
// once, from a y of which nothing was rounded, and scale the row's largest magnitude over that of
// the type (448 of fp8, 127 of i8), or 1 for a row of nothing above 2^-100. To the backward pass
// that is rounding too: it is the same for every output.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/problem.hpp"
#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in rmsnorm.cpp; listed in kernels/catalog.cpp.
const Op& rmsnorm_op();

namespace rmsnorm {

constexpr const char* stage_forward = "forward";
constexpr const char* stage_backward = "backward";

constexpr std::int64_t most_features = 65536;

enum class Convention { llama, gemma, t5 };

/// A problem's sizes and options, read once.
struct Layer {
  std::int64_t m = 0;  // tokens
  std::int64_t d = 0;  // features of a token
  float eps = 0;
  Convention convention = Convention::llama;
  bool backward = false;
  bool adds = false;        // the residual is added to x
  bool adds_after = false;  // the residual is added to y
  bool saves = false;       // the forward pass writes rstd, and the backward pass reads it
  DType dtype = DType::f32;
  DType weight_dtype = DType::f32;
  DType out_dtype = DType::f32;  // of y

  bool quantises() const { return out_dtype != dtype; }
};
Layer layer_of(const Problem& problem);

/// The places of the op's tensors. Forward: x, residual [m, d] if it is added, w [d], y, sum as
/// residual, rstd [m] in f32 if saved, 1 / sqrt(mean(x²) + eps), scale [m] in f32 if y is
/// quantised. Backward: x (the sum where the residual was added), w, dy, dsum, rstd, dx, dw.
TensorPlaces places_of(const Layer& layer);

/// The definition in float64, of either pass.
void reference(const Layer& layer, ReferenceTensors& tensors, Parallel& parallel);

std::vector<const Family*> cuda_families();
std::vector<const Family*> cpu_families();

/// Plain kernels with a block for each row: of the fallback, and of the baseline.
Program backward_fallback_program(const Layer& layer, const DeviceFacts& facts);

/// What a user would write without fftune: one plain kernel for each step of the formula.
std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace rmsnorm
}  // namespace fftune
