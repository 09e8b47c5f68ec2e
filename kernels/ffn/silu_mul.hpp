// The launch side of silu_mul.cu: the step between the products of an unfused pipeline.
#pragma once

#include <optional>

#include "core/problem.hpp"
#include "device/program.hpp"

namespace fftune::ffn {

/// Appends out [m,h] = act(gate [m,h]) ⊙ up [m,h] in the problem's dtype and activation; without
/// `up`, `gate` is [m,2h], each row gate and then up.
void append_silu_mul(Program& program, const Problem& problem, const Pointer& gate,
                     const std::optional<Pointer>& up, const Pointer& out);

}  // namespace fftune::ffn
