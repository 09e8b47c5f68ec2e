// The elementwise launches of an unfused pipeline, between its library products: silu_mul.cu and
// add_rows.cu.
#pragma once

#include <optional>

#include "core/problem.hpp"
#include "device/program.hpp"

namespace fftune::ffn {

/// Appends out [m,h] = act(gate [m,h]) ⊙ up [m,h] in the problem's dtype and activation; without
/// `up`, `gate` is [m,2h], each row gate and then up.
void append_silu_mul(Program& program, const Problem& problem, const Pointer& gate,
                     const std::optional<Pointer>& up, const Pointer& out);

/// Appends y [m,d] += bias [d] + residual [m,d], those that the problem's form has, if any.
void append_add_rows(Program& program, const Problem& problem);

}  // namespace fftune::ffn
