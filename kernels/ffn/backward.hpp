// The backward pass of ffn. With c = act(gate) ⊙ up and y = c·w_downᵀ, for a gradient dy of y:
//
//   dc = dy·w_down,  d_gate = dc ⊙ up ⊙ act'(gate),  d_up = dc ⊙ act(gate)
//   dx = d_gate·w_gate + d_up·w_up
//   dw_gate = d_gateᵀ·x,  dw_up = d_upᵀ·x,  dw_down = dyᵀ·c
//
// gate and up are what the forward pass saved (save=preact) or are computed again from x
// (save=input), which keeps 2 m h elements less between the passes and costs two products more.
#pragma once

#include <vector>

#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/product.hpp"

namespace fftune::ffn {

/// Of a problem of the pass bwd, as the op's functions of these names.
std::vector<TensorSpec> backward_tensors(const Problem& problem);
Places backward_places(const Problem& problem);
/// Stage `stage` by its name.
void backward_reference(const Problem& problem, const std::string& stage, ReferenceTensors& tensors,
                        Parallel& parallel);
std::vector<Baseline> backward_baselines(const Problem& problem, const DeviceFacts& facts);

/// The stages as products.
Product d_hidden_product(const Problem& problem);
Product d_x_product(const Problem& problem);
Product d_gate_up_product(const Problem& problem);
Product d_down_product(const Problem& problem);

/// The families of these stages, and gate_up's on the CPU.
std::vector<const Family*> backward_families();
const Family& cpu_gate_up_blas_family();
const Family& cpu_gate_up_plain_family();

}  // namespace fftune::ffn
