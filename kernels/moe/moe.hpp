// A mixture of experts: each token goes through the gated feed-forward networks (ffn.hpp) of the
// experts that it has chosen, and gets the weighted sum of their outputs.
//
//   y_t = Σ_j weights[t, j] · ffn_ids[t, j](x_t)          over its `top-k` choices, in their order
//   y_t = Σ_j ffn_ids[t, j](weights[t, j] · x_t)          weigh=before
//   y_t = residual_t + the sum                            residual=yes
//
// Shared experts are the last ones of the stacked weights. Every token has chosen them too, after
// its ids, with weight 1.
//
// An id outside of [0, experts) names an expert of another device, as with expert parallelism: the
// choice adds nothing. The ids of a token differ from each other. Only the device knows how many
// tokens an expert has, from none to all.
//
// With the size `own-experts` the weights are those of so many experts alone, the slice of a rank.
// Its first one is the value of the tensor first_expert [1], so that the problem, and with it the
// plan's kernels, are the same on all ranks. The stage own_ids makes ids of the slice from ids of
// all experts, -1 for experts of other ranks. The sum of y over the ranks is another op's.
//
// Choices are sorted by expert (core/distribution.hpp): row i of gate, up and hidden belongs to the
// i-th choice in that order, so that the rows of an expert are neighbours. There are m · (top-k +
// shared) rows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/distribution.hpp"
#include "core/problem.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/gemm/family.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "kernels/gemm/quantise/quantise.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in moe/op.cpp; listed in kernels/catalog.cpp.
const Op& moe_ffn_op();

namespace moe {

/// The sizes of a problem.
struct Shape {
  std::int64_t m = 0;        // tokens
  std::int64_t d = 0;        // embedding
  std::int64_t h = 0;        // intermediate, of one expert
  std::int64_t experts = 0;  // in the weights, but for shared ones
  std::int64_t of_all = 0;   // experts to choose from: more with own-experts
  std::int64_t top_k = 0;    // of them that a token chooses
  std::int64_t shared = 0;   // experts beside those: all tokens', with weight 1

  std::int64_t all_experts() const { return experts + shared; }
  std::int64_t choices() const { return top_k + shared; }  // of a token
  std::int64_t rows() const { return m * choices(); }
};
Shape shape_of(const Problem& problem);
/// Whether the weights are those of some experts alone: the size own-experts.
bool has_own_experts(const Problem& problem);
SizeField own_experts_size();
/// An id of all experts as own_ids has it, where the slice begins with the expert `first`.
std::int32_t own_id(const Shape& shape, std::int32_t id, std::int32_t first);
/// The tensor with ids of the experts in the weights: own_ids, or ids.
const char* own_ids_of(const Problem& problem);
Routing routing_of(const Problem& problem);

constexpr std::int64_t most_shared = 8;

/// The choices of all experts: each token's ids, then those of the shared experts.
std::vector<std::int32_t> all_choices(const Shape& shape, const std::vector<std::int32_t>& ids);
/// The rows that experts should have.
std::vector<ExpertsAlike> expected_rows(const Problem& problem);

/// Whether the tokens' rows are multiplied by the weights of their choices, rather than what the
/// experts give: weigh=before.
bool weighs_before(const Problem& problem);
/// How w_gate_up has both weights: gate-up=halves or interleaved.
Packing packing_of(const Problem& problem);
/// In fp8, x, the weights and hidden are elements of fp8 with f32 scales, as in ffn; what is
/// neither a product's operand nor a scale is bf16.
///
/// scales=tensor: one for x, one for hidden (both given), and one for each weight of each expert.
/// scales=token: one for each token of x and for each row of a weight (a channel). Hidden has one
/// for each 128 elements of a row, computed by the op, because a tile of it has no whole rows.
/// Scales=block: one for each 128 elements of a row of x and of hidden, and for each block of 128
/// rows by 128 columns of a weight.
enum class Scales { none, tensor, token, block };
///
/// With quantise=token or block, x is of the problem's dtype, and the op quantises it.
Scales scales_of(const Problem& problem);
/// The type of the weights, and of the operands of products.
DType element_dtype(const Problem& problem);
DType wide_dtype(const Problem& problem);

/// Packed weights (weights=int4 and so on) of all experts, [experts * h, d] and [experts * d, h],
/// or none. They are expanded in a stage before each product, unless one kernel does both.
std::vector<PackedWeight> packed_gate_up(const Problem& problem);
std::vector<PackedWeight> packed_down(const Problem& problem);

/// Whether gate, up and the experts' outputs have biases: bias=all.
bool has_bias(const Problem& problem);

/// Whether y is added to a residual: residual=yes.
bool has_residual(const Problem& problem);

/// Whether the stage route finds the weight of each sorted row, for stages that go by these.
bool has_row_weights(const Problem& problem);
/// Whether the pass bwd reads b_down: with weigh=after the gradient of a weight does.
bool reads_down_bias(const Problem& problem);

// The stages. Forward:
//
//   own_ids    with own-experts: own_ids, from ids and first_expert
//   route      offsets, tokens and places, from ids: the sorted order of the choices; weigh=before:
//              row_weights, the weight of each row
//   quantise   with quantise=token, block: x as e4m3
//   expand_gate_up, and expand_down before down: packed weights as dense ones
//   gate_up    gate = x·w_gateᵀ, up = x·w_upᵀ, hidden = act(gate) ⊙ up, of the rows' experts
//   down       expert_out = hidden·w_downᵀ
//   combine    y = the sum over a token's choices of weight · expert_out, and the residual
//
// Backward:
//
//   own_ids and route; and gate_up where gate and up are computed again
//   d_hidden   d_hidden = dy·w_down
//   weigh      d_gate = d_hidden ⊙ up ⊙ act'(gate), d_up = d_hidden ⊙ act(gate), hidden, each times
//              the row's weight: weighted_d_gate, weighted_d_up, weighted_hidden; and
//              d_weights = Σ d_hidden ⊙ hidden + dy·b_down
//   d_x        dx_rows = weighted_d_gate·w_gate + weighted_d_up·w_up
//   d_gate_up  dw_gate = weighted_d_gateᵀ·x, dw_up = weighted_d_upᵀ·x
//   d_down     dw_down = dyᵀ·weighted_hidden
//   d_biases   db_gate = Σ weighted_d_gate, db_up = Σ weighted_d_up, db_down = Σ weight · dy, over
//              an expert's rows
//   combine_dx dx = the sum over a token's choices of dx_rows
//
// With packed weights the gradients of gate and up are one tensor too, weighted_d_gate_up, whose
// columns are in the order of the rows of w_gate_up. Then d_x is one product with k = 2 h, and
// d_gate_up one with 2 h rows.
//
// With frozen=yes d_gate_up, d_down and d_biases are left out.
//
// With weigh=before the weight multiplies x·w_gateᵀ and x·w_upᵀ alone. The stage weigh then also
// writes unweighted d_gate, d_up and hidden, which d_x, d_down and d_biases take. The stage
// combine_dx, which has u = d_gate·w_gate + d_up·w_up in dx_rows, computes dx = Σ weight · u and
// d_weights = x·u.

constexpr const char* stage_own_ids = "own_ids";
constexpr const char* stage_route = "route";
constexpr const char* stage_combine = "combine";
constexpr const char* stage_weigh = "weigh";
constexpr const char* stage_d_biases = "d_biases";
constexpr const char* stage_combine_dx = "combine_dx";

/// The names of the problem's stages, in order.
std::vector<std::string> stage_names(const Problem& problem);
/// The GEMM stages among them; null: the stage is not a GEMM.
const GemmStage* gemm_stage(const Problem& problem, std::string_view name);

/// The gradients of gate and of up, as weigh writes them and later stages read them: two tensors,
/// or with packed weights one. `weighted`: times the rows' weights.
std::vector<std::string_view> gate_gradients(const Problem& problem, bool weighted);
/// Those of the loss by gate and by up themselves: weighted, unless weights are applied before.
std::vector<std::string_view> gate_gradients(const Problem& problem);
/// The rows that dw_down sums, of the same kind: weighted_hidden or hidden.
std::string_view hidden_of_gradient(const Problem& problem);
/// The biases' gradients and the summands of each: rows in the sorted order, or of dy.
struct BiasGradient {
  std::string_view bias, rows;  // "db_down", "dy"
  std::int64_t width = 0;
};
std::vector<BiasGradient> bias_gradients(const Problem& problem);

/// Computes the outputs of the stage of that name in float64.
void reference(const Problem& problem, const std::string& stage, ReferenceTensors& tensors,
               Parallel& parallel);

/// The other stages on the CPU (cpu_families.cpp): combine of the pass fwd, combine_dx of bwd.
Program cpu_own_ids_program(const Problem& problem, const DeviceFacts& facts, const Config&);
Program cpu_route_program(const Problem& problem);
Program cpu_combine_program(const Problem& problem, const DeviceFacts& facts, const Config&);
Program cpu_weigh_program(const Problem& problem, const DeviceFacts& facts, const Config&);
Program cpu_d_biases_program(const Problem& problem, const DeviceFacts& facts, const Config&);

/// For forward passes in their plain forms (baselines.cpp).
std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

/// Families of the GEMM stages, and of the others.
std::vector<const Family*> gemm_families();
std::vector<const Family*> own_ids_families();
std::vector<const Family*> route_families();
std::vector<const Family*> combine_families();
std::vector<const Family*> weigh_families();
std::vector<const Family*> d_biases_families();
/// Several stages per family, for few tokens.
std::vector<const Family*> decode_families();

}  // namespace moe
}  // namespace fftune
