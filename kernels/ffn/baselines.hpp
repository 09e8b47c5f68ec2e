// What a user would write without fftune: library products and an elementwise kernel.
#pragma once

#include <string_view>
#include <vector>

#include "core/problem.hpp"
#include "device/facts.hpp"
#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune::ffn {

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

// What is between the library's products, also in masked-ffn's baselines. Tensors [m,h] by their
// names.

/// Appends hidden = act(gate) ⊙ up. Without `up`, gate is [m,2h], each row gate and then up.
void append_act_mul(Program& program, const Problem& problem, const DeviceFacts& facts,
                    const TensorPlaces& places, std::string_view gate, std::string_view up);

/// Appends d_gate, d_up and hidden, of the gradient dc of hidden.
void append_gate_gradient(Program& program, const Problem& problem, const DeviceFacts& facts,
                          const TensorPlaces& places, std::string_view gate, std::string_view up);

}  // namespace fftune::ffn
