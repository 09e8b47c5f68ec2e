// RMSNorm with a gate, as linear-attention layers have it behind their core. With a = act(z), z the
// gate, and norms over rows of d features:
//
//   order=after    y = (x̂ ⊙ w) ⊙ a,  x̂ = x / sqrt(mean(x²) + eps)                (gated delta rule,
//   KDA) order=before   y = x̂ ⊙ w,        x̂ = u / sqrt(mean(u²) + eps),  u = x ⊙ a     (Mamba-2)
//
// The d features are those of a head, all heads having one w [d]: then a token's heads are rows of
// their own. Or they are one of `groups` parts of a token, each with its own part of w
// [groups · d], or with weights-for=token all with one w [d], in the forward pass.
//
// Conventions: t5 rounds nothing on the way (fla, mamba_ssm and vLLM); llama rounds x̂ to the dtype,
// and its product with w to the dtype of both, as transformers' modules do.
//
// Backward, with rounding counted as the identity, r = 1 / sqrt(…):
//   after    n = x̂ ⊙ w,  dn = dy ⊙ a,  dz = dy ⊙ n ⊙ act'(z)
//            g = dn ⊙ w,  dx = r (g − x̂ mean(g x̂)),  dw = Σ dn ⊙ x̂
//   before   g = dy ⊙ w,  du = r (g − x̂ mean(g x̂)),  dx = du ⊙ a,  dz = du ⊙ x ⊙ act'(z),
//            dw = Σ dy ⊙ x̂
//
// With norm=none there is no norm: y = x ⊙ a, as of attention with an output gate. With
// gate-for=norm z has one element for each norm, [m, groups], which all its features share: a gate
// for each head. Both are of the forward pass alone.
//
// `z-row` is the stride of z between tokens: the gate may be columns of a projection's result.
// Where these are in blocks, as in Qwen3-Next, m counts the blocks, and groups the heads of each.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/row_space.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in op.cpp; listed in kernels/catalog.cpp.
const Op& gated_rmsnorm_op();

namespace gated_rmsnorm {

constexpr std::int64_t most_features = 65536;

/// A problem's sizes and options, read once.
struct Layer {
  std::int64_t m = 0;       // tokens
  std::int64_t groups = 1;  // norms of a token
  std::int64_t d = 0;       // features of a norm
  std::int64_t z_row = 0;   // stride of z between tokens, in elements
  float eps = 0;
  bool before = false;    // the gate comes before the norm
  bool sigmoid = false;   // the gate's activation, else silu
  bool rounds = false;    // llama
  bool normed = true;     // there is a norm
  bool row_gate = false;  // a gate for each norm
  bool one_w = false;     // for all norms of a token
  bool backward = false;
  bool frozen = false;  // the backward pass leaves out dw
  DType dtype = DType::f32;
  DType weight_dtype = DType::f32;

  std::int64_t rows() const { return m * groups; }
  std::int64_t width() const { return groups * d; }
  std::int64_t z_width() const { return row_gate ? groups : width(); }
  std::int64_t w_width() const { return one_w ? d : width(); }
};
Layer layer_of(const Problem& problem);

/// Forward: x, z [m, groups · d], w [groups · d] or [d], y; without a norm no w. Backward: dy, x,
/// z, w, dx, dz, dw.
std::vector<TensorSpec> tensors_of(const Layer& layer);

/// The definition in float64, of either pass.
void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

std::vector<const Family*> cuda_families(), cpu_families();

}  // namespace gated_rmsnorm
}  // namespace fftune
