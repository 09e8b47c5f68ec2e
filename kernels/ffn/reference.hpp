// The definition of ffn in float64.
#pragma once

#include "core/problem.hpp"
#include "registry/op.hpp"

namespace fftune::ffn {

/// Computes `hidden` (and gate and up, where they are saved) from x, w_gate and w_up (stage 0), or
/// y from hidden and w_down (stage 1). In fp8 with elements as they are stored: `hidden` is in
/// units of its scale, and rounded; with scales of blocks, stage 0 computes those of hidden too.
void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
               Parallel& parallel);

}  // namespace fftune::ffn
