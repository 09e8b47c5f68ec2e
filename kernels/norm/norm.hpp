// Normalisation of rows of d features: the ops rmsnorm and layernorm.
//
// rmsnorm (Zhang and Sennrich 2019, arXiv 1910.07467): y = x̂ ⊙ factor(w), x̂ = x / sqrt(mean(x²) +
// eps), the mean over a row of d features. Conventions: llama rounds x̂ to the dtype before it
// multiplies, and factor(w) = w; gemma rounds nothing on the way, and factor(w) = 1 + w; t5 rounds
// nothing either, and factor(w) = w.
//
// layernorm (Ba, Kiros and Hinton 2016, arXiv 1607.06450): y = x̂ ⊙ w + b, x̂ = (x − mean(x)) /
// sqrt(var(x) + eps), the variance with a denominator of d. Nothing is rounded on the way.
//
// With the residual added, sum = x + residual rounded to the dtype is written too and is
// normalised. The backward pass then takes that sum in the place of x, and the gradient of the sum
// that comes from beyond the layer; dx is the gradient of both x and residual:
//   g = dy ⊙ factor(w)    dx = (g − mean(g) − x̂ mean(g x̂)) / deviation + dsum
//   dw = the sum over rows of dy ⊙ x̂    db = the sum over rows of dy
// For rmsnorm there is no mean(g) and no db. Rounding counts as the identity: where the forward
// pass rounds x̂, its gradient is taken, and multiplied, as if it had not.
//
// residual=after adds the residual to the norm's result instead, before the one rounding, as
// Gemma 2's norms behind attention and the feed-forward network have it: y = residual + x̂ ⊙
// factor(w). It is of the forward pass.
//
// If the output is quantised, y = q scale with a scale for each token. Then q is y / scale rounded
// once, from an unrounded y. The scale is the row's largest magnitude over that of the type (448
// for fp8, 127 for i8), or 1 if no element is above 2^-100. The backward pass treats that as
// rounding too: it is the same for every output.
//
// layernorm's kernels, which take the mean away first, are in centred_*.cu.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/row_space.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in op.cpp; listed in kernels/catalog.cpp.
const Op& rmsnorm_op();
const Op& layernorm_op();

namespace norm {

constexpr std::int64_t most_features = 65536;

enum class Convention { llama, gemma, t5 };

/// A problem's sizes and options, read once.
struct Layer {
  std::int64_t m = 0;  // tokens
  std::int64_t d = 0;  // features of a token
  float eps = 0;
  bool centres = false;  // layernorm: the mean is taken away, and b added
  Convention convention = Convention::t5;
  bool backward = false;
  bool adds = false;        // the residual is added to x
  bool adds_after = false;  // the residual is added to y
  bool batch_invariant = false;
  bool saves = false;   // the forward pass writes rstd, and the backward pass reads it
  bool frozen = false;  // the backward pass computes dx alone
  DType dtype = DType::f32;
  DType weight_dtype = DType::f32;
  DType out_dtype = DType::f32;  // of y

  bool quantises() const { return out_dtype != dtype; }
  RowShape rows() const { return {.rows = m, .elements = d, .dtype = dtype}; }
};
Layer layer_of(const Problem& problem);

/// Forward: x, residual [m, d] if it is added, w [d], b [d] of layernorm, y, sum as residual, rstd
/// [m] in f32 if saved, 1 / deviation, scale [m] in f32 if y is quantised. Backward: x (the sum
/// where the residual was added), w, dy, dsum, rstd, dx, dw, db of layernorm.
std::vector<TensorSpec> tensors_of(const Layer& layer);
TensorPlaces places_of(const Layer& layer);

/// The definition in float64, of either pass.
void reference(const Layer& layer, ReferenceTensors& tensors, Parallel& parallel);

/// Rows in registers, each read once by the threads that share it.
std::vector<const Family*> row_families();
std::vector<const Family*> centred_row_families();
/// Plain kernels with a block for each row, of both passes.
std::vector<const Family*> fallback_families();
std::vector<const Family*> centred_fallback_families();
std::vector<const Family*> cpu_families();

/// The program of the fallback, which is also that of the baseline.
Program backward_fallback_program(const Layer& layer, const DeviceFacts& facts);

/// The arguments of the forward kernels, and of the backward kernels that write dx, in order. To
/// `third` go partial sums, or what the fallback keeps of the rows.
std::vector<Argument> forward_arguments(const Layer& layer);
std::vector<Argument> backward_arguments(const Layer& layer, const Argument& third);
/// The first template arguments of those kernels: for rmsnorm "fftune::bf16, float,
/// fftune::llama_norm, true, false" (whether a residual is added, and whether rstd is saved), for
/// layernorm "fftune::bf16, true".
std::string template_arguments(const Layer& layer);
/// The device's type of a convention: "fftune::llama_norm".
std::string convention_type(Convention convention);

/// Baselines that a user would write without fftune: one plain kernel for each step of the formula.
std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace norm
}  // namespace fftune
