// The stages of masked-linear and masked-ffn: those of linear and of ffn, with the weights and the
// gradients of two experts and the tokens in two groups by the mask. Where tokens are rows of C,
// rows are grouped; where they are summed over, the reduction is.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "kernels/gemm/family.hpp"

namespace fftune::masked {

/// The tensors that either expert has in place of the dense op's: "dw_before" is "dw_true_before"
/// of the true expert, which is the first, and "dw_false_before" of the other. The name itself
/// twice where both share the tensor.
std::array<std::string_view, 2> of_experts(std::string_view name);

/// Whether the rows of the tensor are in the order of the mask (sorted_by_mark) rather than of the
/// tokens: gate, up, hidden and their gradients, so that those of one expert are neighbours.
bool is_sorted(std::string_view name);

/// Those of the problem's pass, in order.
std::vector<GemmStage> gemm_stages(const Problem& problem);

}  // namespace fftune::masked
