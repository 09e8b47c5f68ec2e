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

/// The stages after gate_up, which is the first where gate and up are computed again.
constexpr const char* stage_d_hidden =
    "d_hidden";                           // dy, w_down, gate, up -> d_gate, d_up(, hidden)
constexpr const char* stage_d_x = "d_x";  // d_gate, d_up, w_gate, w_up -> dx
constexpr const char* stage_d_gate_up = "d_gate_up";  // d_gate, d_up, x -> dw_gate, dw_up
constexpr const char* stage_d_down = "d_down";        // dy, hidden -> dw_down

/// Whether gate and up are computed again.
bool recomputes(const Problem& problem);

/// Of a problem of the pass bwd, as the op's functions of these names.
std::vector<TensorSpec> backward_tensors(const Problem& problem);
std::vector<StageSpec> backward_stages(const Problem& problem);
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
