// The elementwise part of an unfused gated feed-forward network (Shazeer 2020, arXiv 2002.05202):
// out = act(gate) ⊙ up, with gate and up as two tensors or as the halves of one packed row.
//
// The backward pass: dgate = dout ⊙ up ⊙ act'(gate), dup = dout ⊙ act(gate), packed as the inputs
// are.
#pragma once

#include <string_view>

#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in act_mul.cpp; listed in kernels/catalog.cpp.
const Op& act_mul_op();

namespace act_mul {

bool packed(const Problem& problem);

/// The name of the tensor that has gate, up, dgate, dup, out or dout: packed gates and ups are the
/// halves of each row of gate_up [m, 2 h] and dgate_up; all others are [m, h].
std::string_view tensor_with(const Problem& problem, std::string_view part);

std::vector<const Family*> cuda_families(), cpu_families();

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace act_mul
}  // namespace fftune
