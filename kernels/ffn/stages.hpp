// The stages of ffn, each as one GEMM. With c = act(gate) ⊙ up and y = c·w_downᵀ, and for a
// gradient dy of y:
//
//   gate_up    gate = x·w_gateᵀ,  up = x·w_upᵀ,  hidden = c
//   down       y = hidden·w_downᵀ (+ b_down) (+ residual)
//   d_hidden   dc = dy·w_down,  d_gate = dc ⊙ up ⊙ act'(gate),  d_up = dc ⊙ act(gate)
//   d_x        dx = d_gate·w_gate + d_up·w_up
//   d_gate_up  dw_gate = d_gateᵀ·x,  dw_up = d_upᵀ·x
//   d_down     dw_down = dyᵀ·hidden
//
// The pass bwd takes gate and up as the forward pass saved them (save=preact), and d_hidden
// computes hidden; or it begins with gate_up, which computes the three again from x (save=input): 2
// m h elements less between the passes, for two products more.
#pragma once

#include <vector>

#include "kernels/gemm/family.hpp"

namespace fftune::ffn {

constexpr const char* stage_gate_up = "gate_up";
constexpr const char* stage_down = "down";
constexpr const char* stage_d_hidden = "d_hidden";
constexpr const char* stage_d_x = "d_x";
constexpr const char* stage_d_gate_up = "d_gate_up";
constexpr const char* stage_d_down = "d_down";

/// Those of the problem's pass, in order.
std::vector<GemmStage> gemm_stages(const Problem& problem);

/// All families of the op but those of the norm, in the order of choice: of the pass fwd, and of
/// bwd.
std::vector<const Family*> forward_families();
std::vector<const Family*> backward_families();

GemmProblem gate_up_gemm(const Problem& problem);
GemmProblem down_gemm(const Problem& problem);
GemmProblem d_hidden_gemm(const Problem& problem);
GemmProblem d_x_gemm(const Problem& problem);
GemmProblem d_gate_up_gemm(const Problem& problem);
GemmProblem d_down_gemm(const Problem& problem);

}  // namespace fftune::ffn
