// Layers with two experts behind a mask: token i goes through the weights of the true expert where
// byte i of the mask is not zero, else through those of the false one.
//
// masked-linear: y_i = x_i·w_maskᵀ. masked-ffn: the gated feed-forward network (ffn.hpp) of the
// token's expert. The mask's contents are known on the device alone.
//
// The backward pass of masked-linear: dx_i = dy_i·w_mask, and of either expert dw = Σ dy_iᵀ·x_i
// over its own tokens, zero where it has none, added to other gradients where that is asked for.
// That of masked-ffn is the one of ffn (ffn/ffn.hpp) with the weights of the token's expert,
// and each weight's gradient sums over the tokens of its expert.
//
// All intermediates (gate, up, their gradients and hidden) are in the order of the mask
// (sorted_by_mark): the rows of the true expert, then of the other. The saved gate and up of the
// forward pass have that order too, so that the backward pass reads neighbouring rows.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "core/problem.hpp"
#include "kernels/gemm/family.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in masked/op.cpp; listed in kernels/catalog.cpp.
const Op& masked_linear_op();
const Op& masked_ffn_op();

namespace masked {

/// Computes the outputs of the stage of that name in float64.
void reference(const Problem& problem, const std::string& stage, ReferenceTensors& tensors,
               Parallel& parallel);

std::vector<const Family*> linear_families();
std::vector<const Family*> ffn_families();

std::vector<Baseline> linear_baselines(const Problem& problem, const DeviceFacts& facts);
std::vector<Baseline> ffn_baselines(const Problem& problem, const DeviceFacts& facts);

// The stages of masked-linear and masked-ffn: those of linear and of ffn, with the weights and the
// gradients of two experts and the tokens in two groups by the mask. Where tokens are rows of C,
// rows are grouped; where they are summed over, the reduction is.

/// The tensors that either expert has in place of the dense op's: "dw_before" is "dw_true_before"
/// of the true expert, which is the first, and "dw_false_before" of the other. The name itself
/// twice where both share the tensor.
std::array<std::string_view, 2> of_experts(std::string_view name);

/// Whether the rows of the tensor are in the order of the mask (sorted_by_mark) rather than of the
/// tokens: gate, up, hidden and their gradients, so that those of one expert are neighbours.
bool is_sorted(std::string_view name);

/// Those of the problem's pass, in order.
std::vector<GemmStage> gemm_stages(const Problem& problem);

}  // namespace masked
}  // namespace fftune
