// The root mean square norm in front of ffn: x, or the sum of x and a residual, is normalised into
// what w_gate and w_up are multiplied with. It is the forward pass of rmsnorm
// (kernels/norm/norm.hpp) as ffn's first stage: its tensors, its reference and its families,
// under the names that they have here. Where launches may be programmatic, gate_up starts while the
// norm is at work and fetches weights.
#pragma once

#include <vector>

#include "core/problem.hpp"
#include "registry/op.hpp"

namespace fftune::ffn {

/// x(, x_residual), w_norm -> normalised(, sum)
constexpr const char* stage_norm = "norm";

/// The user's options for the norm.
std::vector<OptionField> norm_options();

/// Why those options do not go together with others, one line; empty: they do.
std::string norm_contradiction(const Problem& problem);

/// The tensors that a problem with a norm has beside the others, of one role.
std::vector<TensorSpec> norm_tensors(const Problem& problem, Role role);

StageSpec norm_stage(const Problem& problem);

/// The stage's outputs in float64.
void norm_reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

/// The families of the stage, the fastest expected first.
std::vector<const Family*> norm_families();

/// Appends what a user would write for the norm: plain kernels, for which `baseline` gets a tensor,
/// or, on the CPU, the loop over rows.
void append_norm(Baseline& baseline, const Problem& problem, const DeviceFacts& facts);

}  // namespace fftune::ffn
