// The gated feed-forward network of Llama (Shazeer 2020, arXiv 2002.05202): y = (act(x·w_gateᵀ) ⊙
// (x·w_upᵀ))·w_downᵀ. Without a gate (gate=no, as in GPT-2): y = act(x·w_upᵀ + b_up)·w_downᵀ +
// b_down. Options add a bias or a residual to y, and a root mean square norm of x (norm.hpp). Its
// stages, also of the backward pass, are below.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/problem.hpp"
#include "device/program.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/gemm/family.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "kernels/gemm/quantise/quantise.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in ffn/op.cpp; listed in kernels/catalog.cpp.
const Op& ffn_op();

namespace ffn {

/// The sizes of a problem: "m" tokens, "d" embedding, "h" intermediate.
struct Shape {
  std::int64_t m = 0;
  std::int64_t d = 0;
  std::int64_t h = 0;
};
Shape shape_of(const Problem& problem);

/// In fp8, x, the weights and hidden are elements of fp8 with f32 scales: a number is its element
/// times the scale. Tensors that are neither operands of a product nor scales are bf16.
///
/// scales=tensor: one for each tensor; hidden's is given too, as in static quantisation.
/// Scales=block: one for each 128 elements of a row of x and of hidden, and for each block of 128
/// rows by 128 columns of a weight; the last of them may be smaller. The op computes hidden's scale
/// so that the largest magnitude of the 128 becomes 448, the largest number of e4m3 (DeepSeek-V3,
/// arXiv 2412.19437, 3.3.2).
bool is_quantised(const Problem& problem);
DType wide_dtype(const Problem& problem);
bool has_block_scales(const Problem& problem);

/// Features that a problem requests besides the plain forward pass.
struct Form {
  bool gated = true;      // gate=yes
  bool bias_up = false;   // bias=both: before the activation, without a gate
  bool saves = false;     // gate and up are stored too: save=preact, or in the pass bwd save=input
  bool bias = false;      // y has a bias: bias=down or both
  bool y_scale = false;   // columns of y have a factor each, before that: y-scale=yes
  bool residual = false;  // y is added to a residual: residual=yes
  bool accumulates = false;  // bwd: the weights' gradients are added to others: accumulate=yes
  bool normalises = false;   // x is normalised first: norm=rms or add-rms
  bool adds_before = false;  // and a residual is added to it before that: norm=add-rms
  bool adds() const { return bias || y_scale || residual; }
};
Form form_of(const Problem& problem);
/// Whether the gradients of gate and up come with hidden, for dw_down: unless it was computed
/// again, or weights are frozen.
bool stores_hidden(const Problem& problem);

/// Computes the outputs of the stage of that name in float64. In fp8 with elements as they are
/// stored: `hidden` is in units of its scale, and rounded; with scales of blocks, gate_up computes
/// those of hidden too.
void reference(const Problem& problem, const std::string& stage, ReferenceTensors& tensors,
               Parallel& parallel);

/// d_gate, d_up and, if stores_hidden(), hidden in float64 from gate, up and dc, the
/// gradient of hidden, which it takes away.
void gate_gradient(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

// The stages of ffn, each as one GEMM. With c = act(gate) ⊙ up and y = c·w_downᵀ, and for a
// gradient dy of y:
//
//   gate_up    gate = x·w_gateᵀ,  up = x·w_upᵀ,  hidden = c
//   up         hidden = act(x·w_upᵀ (+ b_up)), in the place of gate_up: gate=no
//   down       y = hidden·w_downᵀ (+ b_down) (* y_scale) (+ residual)
//   d_hidden   dc = dy·w_down,  d_gate = dc ⊙ up ⊙ act'(gate),  d_up = dc ⊙ act(gate)
//   d_x        dx = d_gate·w_gate + d_up·w_up
//   d_gate_up  dw_gate = d_gateᵀ·x,  dw_up = d_upᵀ·x
//   d_down     dw_down = dyᵀ·hidden
//
// The pass bwd takes gate and up as the forward pass saved them (save=preact), and d_hidden
// computes hidden. With save=input it begins with gate_up, which computes the three again from x: 2
// m h elements less between the passes, for two products more.

// Packed weights (weights=int4) are expanded in a stage before each product, unless one kernel does
// both.

// With quantise=token or block a stage before each product quantises its tokens. The epilogue of a
// gate does that itself for scales of blocks.

constexpr const char* stage_quantise = "quantise";
constexpr const char* stage_quantise_hidden = "quantise_hidden";
constexpr const char* stage_expand_gate_up = "expand_gate_up";
constexpr const char* stage_expand_down = "expand_down";
constexpr const char* stage_gate_up = "gate_up";
constexpr const char* stage_up = "up";
constexpr const char* stage_down = "down";
constexpr const char* stage_d_hidden = "d_hidden";
constexpr const char* stage_d_x = "d_x";
constexpr const char* stage_d_gate_up = "d_gate_up";
constexpr const char* stage_d_down = "d_down";

/// Those of the problem's pass, in order.
std::vector<GemmStage> gemm_stages(const Problem& problem);

/// All families of the op except those of the norm, in the order of choice, for the passes fwd and
/// bwd.
std::vector<const Family*> forward_families();
std::vector<const Family*> backward_families();

GemmProblem gate_up_gemm(const Problem& problem);
GemmProblem up_gemm(const Problem& problem);
GemmProblem down_gemm(const Problem& problem);
/// The products with the packed weights themselves.
GemmProblem packed_gate_up_gemm(const Problem& problem);
GemmProblem packed_down_gemm(const Problem& problem);
/// Packed weights of the first product, and of the second; none where they are dense.
std::vector<PackedWeight> packed_gate_up(const Problem& problem);
std::vector<PackedWeight> packed_down(const Problem& problem);
/// x and hidden where the op quantises them.
QuantisedRows quantised_x(const Problem& problem);
QuantisedRows quantised_hidden(const Problem& problem);
/// Whether a stage of its own quantises hidden.
bool has_hidden_stage(const Problem& problem);
GemmProblem d_hidden_gemm(const Problem& problem);
GemmProblem d_x_gemm(const Problem& problem);
GemmProblem d_gate_up_gemm(const Problem& problem);
GemmProblem d_down_gemm(const Problem& problem);

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

// Steps between the library's products, also in masked-ffn's baselines. Tensors [m,h] by their
// names.

/// Appends hidden = act(gate) ⊙ up. Without `up`, gate is [m,2h], each row gate and then up.
void append_act_mul(Program& program, const Problem& problem, const DeviceFacts& facts,
                    const TensorPlaces& places, std::string_view gate, std::string_view up);

/// The memory of append_gate_gradient() beside the op's tensors.
std::vector<TensorSpec> gradient_extra(const Problem& problem);
/// Appends d_gate, d_up and hidden, of the gradient dc of hidden.
void append_gate_gradient(Program& program, const Problem& problem, const DeviceFacts& facts,
                          const TensorPlaces& places, std::string_view gate, std::string_view up);

}  // namespace ffn
}  // namespace fftune
