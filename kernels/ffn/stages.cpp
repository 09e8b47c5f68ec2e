#include "kernels/ffn/ffn.hpp"

#include <utility>

#include "kernels/common/op_parts.hpp"

namespace fftune::ffn {
namespace {

constexpr GemmStage gate_up{stage_gate_up, ffn_op, gate_up_gemm};
/// On the CPU the forward pass has its own families for gate_up and down together.
constexpr GemmStage gate_up_again{stage_gate_up, ffn_op, gate_up_gemm, "bwd"};
constexpr ExpandStage gate_up_expansion{stage_expand_gate_up, ffn_op, packed_gate_up};
constexpr ExpandStage down_expansion{stage_expand_down, ffn_op, packed_down};
constexpr GemmStage expand_gate_up{stage_expand_gate_up, ffn_op, packed_gate_up_gemm};
constexpr GemmStage expand_down{stage_expand_down, ffn_op, packed_down_gemm};
/// On the CPU the two products of expanded weights, or with quantised tokens, are not neighbours.
constexpr GemmStage expanded_gate_up{stage_gate_up, ffn_op, gate_up_gemm, "fwd", true};
constexpr GemmStage expanded_up{stage_up, ffn_op, up_gemm, "fwd", true};
constexpr GemmStage expanded_down{stage_down, ffn_op, down_gemm, "fwd", true};
constexpr QuantiseStage x_quantisation{stage_quantise, ffn_op, quantised_x};
constexpr QuantiseStage hidden_quantisation{stage_quantise_hidden, ffn_op, quantised_hidden};
constexpr GemmStage up{stage_up, ffn_op, up_gemm};
constexpr GemmStage down{stage_down, ffn_op, down_gemm};
constexpr GemmStage d_hidden{stage_d_hidden, ffn_op, d_hidden_gemm};
constexpr GemmStage d_x{stage_d_x, ffn_op, d_x_gemm};
constexpr GemmStage d_gate_up{stage_d_gate_up, ffn_op, d_gate_up_gemm};
constexpr GemmStage d_down{stage_d_down, ffn_op, d_down_gemm};

/// C [m,n] of sums of k products, with the problem's types.
GemmProblem gemm_of(const Problem& problem, std::int64_t m, std::int64_t n, std::int64_t k) {
  const DType wide = wide_dtype(problem);
  return {.m = m, .n = n, .k = k, .dtype = problem.dtype, .c_dtype = wide, .wide_dtype = wide};
}

/// Other forms have dense weights, whatever is asked for: contradiction() refuses it.
bool has_packed(const Problem& problem) {
  return packed_format(problem).packed && !is_quantised(problem);
}

Scaling scaling_of(const Problem& problem) {
  if (!is_quantised(problem)) return Scaling::none;
  return has_block_scales(problem) ? Scaling::block : Scaling::tensor;
}

}  // namespace

std::vector<GemmStage> gemm_stages(const Problem& problem) {
  if (problem.pass == "fwd" && !form_of(problem).gated) return {up, down};
  if (problem.pass == "fwd") return {gate_up, down};
  std::vector<GemmStage> stages{d_hidden, d_x};
  if (recomputes(problem)) stages.insert(stages.begin(), gate_up);
  if (!is_frozen(problem)) stages.insert(stages.end(), {d_gate_up, d_down});
  return stages;
}

GemmProblem gate_up_gemm(const Problem& problem) {
  const auto [m, d, h] = shape_of(problem);
  const Form form = form_of(problem);
  GemmProblem gemm = gemm_of(problem, m, h, d);
  gemm.form = GemmForm::dual_b;
  gemm.a = {{form.normalises ? "normalised" : "x"}};
  gemm.b = {{"w_gate"}, {"w_up"}};
  gemm.c = {{"hidden"}};
  gemm.c_dtype = problem.dtype;
  gemm.epilogue = {.kind = EpilogueKind::gated,
                   .activation = parse_activation(problem.option("act"))};
  if (form.saves) {
    gemm.epilogue.gate = "gate";
    gemm.epilogue.up = "up";
  }
  if (is_quantised(problem))
    gemm.quantisation = {.scaling = scaling_of(problem),
                         .a_scale = "x_scale",
                         .b_scale = {"w_gate_scale", "w_up_scale"},
                         .c_scale = "hidden_scale"};
  gemm.follows = form.normalises;
  if (packed_format(problem).packed) {
    gemm.b = {{"w_gate_dense"}, {"w_up_dense"}};
    gemm.follows = gemm.b_depends = true;
  }
  if (!quantises(problem)) return gemm;
  gemm = with_quantised_a(gemm, quantised_x(problem), {"w_gate_scale", "w_up_scale"});
  if (!has_hidden_stage(problem)) {
    gemm.c_dtype = DType::fp8;
    gemm.quantisation.c_scale = "hidden_scale";
  }
  return gemm;
}

GemmProblem up_gemm(const Problem& problem) {
  const auto [m, d, h] = shape_of(problem);
  const Form form = form_of(problem);
  GemmProblem gemm = gemm_of(problem, m, h, d);
  gemm.a = {{form.normalises ? "normalised" : "x"}};
  gemm.b = {{"w_up"}};
  gemm.c = {{"hidden"}};
  gemm.epilogue.activation = parse_activation(problem.option("act"));
  if (form.bias_up) gemm.epilogue.row(row_broadcast::bias) = "b_up";
  gemm.follows = form.normalises;
  if (packed_format(problem).packed) {
    gemm.b = {{"w_up_dense"}};
    gemm.follows = gemm.b_depends = true;
  }
  if (quantises(problem)) return with_quantised_a(gemm, quantised_x(problem), {"w_up_scale"});
  return gemm;
}

GemmProblem down_gemm(const Problem& problem) {
  const auto [m, d, h] = shape_of(problem);
  const Form form = form_of(problem);
  GemmProblem gemm = gemm_of(problem, m, d, h);
  gemm.a = {{"hidden"}};
  gemm.b = {{"w_down"}};
  gemm.c = {{"y"}};
  if (form.bias) gemm.epilogue.row(row_broadcast::bias) = "b_down";
  if (form.y_scale) gemm.epilogue.row(row_broadcast::scale) = "y_scale";
  if (form.residual) gemm.epilogue.source = {{"residual"}};
  if (is_quantised(problem))
    gemm.quantisation = {
        .scaling = scaling_of(problem), .a_scale = "hidden_scale", .b_scale = {"w_down_scale"}};
  gemm.follows = true;
  if (packed_format(problem).packed) {
    gemm.b = {{"w_down_dense"}};
    gemm.b_depends = true;
  }
  if (quantises(problem))
    return with_quantised_a(gemm, quantised_hidden(problem), {"w_down_scale"});
  return gemm;
}

GemmProblem packed_gate_up_gemm(const Problem& problem) {
  return reads_packed(gate_up_gemm(problem), packed_gate_up(problem), form_of(problem).normalises);
}

GemmProblem packed_down_gemm(const Problem& problem) {
  return reads_packed(down_gemm(problem), packed_down(problem), true);
}

std::vector<PackedWeight> packed_gate_up(const Problem& problem) {
  if (!has_packed(problem)) return {};
  const auto [m, d, h] = shape_of(problem);
  std::vector<PackedWeight> weights;
  if (form_of(problem).gated)
    weights.push_back(
        packed_weight(problem, {"w_gate", "w_gate_scale", "w_gate_zero", "w_gate_dense", h, d}));
  weights.push_back(
      packed_weight(problem, {"w_up", "w_up_scale", "w_up_zero", "w_up_dense", h, d}));
  return weights;
}

std::vector<PackedWeight> packed_down(const Problem& problem) {
  if (!has_packed(problem)) return {};
  const auto [m, d, h] = shape_of(problem);
  return {packed_weight(problem, {"w_down", "w_down_scale", "w_down_zero", "w_down_dense", d, h})};
}

QuantisedRows quantised_x(const Problem& problem) {
  const auto [m, d, h] = shape_of(problem);
  return {.from = form_of(problem).normalises ? "normalised" : "x",
          .elements = "x_quantised",
          .scales = "x_scale",
          .rows = m,
          .k = d,
          .dtype = problem.dtype,
          .scaling = quantised_scaling(problem)};
}

QuantisedRows quantised_hidden(const Problem& problem) {
  QuantisedRows rows = quantised_x(problem);
  rows.from = "hidden";
  rows.elements = has_hidden_stage(problem) ? "hidden_quantised" : "hidden";
  rows.scales = "hidden_scale";
  rows.k = problem.size("h");
  return rows;
}

bool has_hidden_stage(const Problem& problem) {
  const Scaling scaling = quantised_scaling(problem);
  return scaling == Scaling::channel || (scaling == Scaling::block && !form_of(problem).gated);
}

GemmProblem d_hidden_gemm(const Problem& problem) {
  const auto [m, d, h] = shape_of(problem);
  GemmProblem gemm = gemm_of(problem, m, h, d);
  gemm.b_major = Major::mn;
  gemm.a = {{"dy"}};
  gemm.b = {{"w_down"}};
  gemm.c = {{"d_gate"}};
  gemm.epilogue = {.kind = EpilogueKind::activation_gradient,
                   .activation = parse_activation(problem.option("act")),
                   .gate = "gate",
                   .up = "up",
                   .d_up = "d_up"};
  if (stores_hidden(problem)) gemm.epilogue.hidden = "hidden";
  gemm.follows = recomputes(problem);
  return gemm;
}

GemmProblem d_x_gemm(const Problem& problem) {
  const auto [m, d, h] = shape_of(problem);
  GemmProblem gemm = gemm_of(problem, m, d, h);
  gemm.form = GemmForm::k_concatenated;
  gemm.b_major = Major::mn;
  gemm.a = {{"d_gate"}, {"d_up"}};
  gemm.b = {{"w_gate"}, {"w_up"}};
  gemm.c = {{"dx"}};
  gemm.follows = true;
  return gemm;
}

GemmProblem d_gate_up_gemm(const Problem& problem) {
  const auto [m, d, h] = shape_of(problem);
  GemmProblem gemm = gemm_of(problem, h, d, m);
  gemm.form = GemmForm::two_outputs;
  gemm.a_major = gemm.b_major = Major::mn;
  gemm.a = {{"d_gate"}, {"d_up"}};
  gemm.b = {{"x"}};
  gemm.c = {{"dw_gate"}, {"dw_up"}};
  if (form_of(problem).accumulates) gemm.epilogue.source = {{"dw_gate_before"}, {"dw_up_before"}};
  gemm.follows = true;
  return gemm;
}

GemmProblem d_down_gemm(const Problem& problem) {
  const auto [m, d, h] = shape_of(problem);
  GemmProblem gemm = gemm_of(problem, d, h, m);
  gemm.a_major = gemm.b_major = Major::mn;
  gemm.a = {{"dy"}};
  gemm.b = {{"hidden"}};
  gemm.c = {{"dw_down"}};
  if (form_of(problem).accumulates) gemm.epilogue.source = {{"dw_down_before"}};
  gemm.follows = true;
  gemm.b_depends = true;
  return gemm;
}

std::vector<const Family*> forward_families() {
  static constexpr const char* expanded = "one product of expanded weights: blocks over OpenBLAS";
  static constexpr const char* plain =
      "one product of expanded or quantised weights: plain loops, the fallback";
  static const auto families = families_of(
      {{packed_sm90_engine, {expand_gate_up, gate_up}, "gate_up_packed_sm90", packed_sm90_summary},
       {packed_sm90_engine, {expand_down, down}, "down_packed_sm90", packed_sm90_summary},
       {packed_decode_engine, {expand_gate_up, gate_up}, "gate_up_packed", packed_decode_summary},
       {packed_decode_engine, {expand_down, down}, "down_packed", packed_decode_summary},
       {cpu_blas_engine,
        {expanded_gate_up, expanded_up, expanded_down},
        "cpu_{}_expanded",
        expanded},
       {cpu_plain_engine,
        {expanded_gate_up, expanded_up, expanded_down},
        "cpu_{}_expanded_plain",
        plain},
       {fused_decode_engine,
        {gate_up, down},
        "ffn_decode",
        "both stages in one launch for few tokens, all weights in flight at once"},
       {decode_engine,
        {gate_up},
        "gate_up_decode",
        "hidden for up to 16 tokens, at the speed of reading w_gate and w_up once"},
       {decode_engine,
        {down},
        "down_decode",
        "y for up to 16 tokens, at the speed of reading w_down once"},
       {sm90_engine,
        {gate_up},
        "gate_up_sm90",
        "hidden = act(x w_gate^T) * (x w_up^T) in one pass over x, with TMA, wgmma and clusters"},
       {decode_engine,
        {up},
        "up_decode",
        "hidden without a gate for up to 16 tokens, at the speed of reading w_up once"},
       {sm90_engine,
        {up},
        "up_sm90",
        "hidden = act(x w_up^T + b_up), with TMA, wgmma and clusters"},
       {sm90_engine, {down}, "down_sm90", "y = hidden w_down^T with TMA, wgmma and clusters"},
       {sm80_engine,
        {gate_up},
        "gate_up_sm80",
        "hidden = act(x w_gate^T) * (x w_up^T) in one pass over x, with mma.sync tiles"},
       {sm80_engine, {up}, "up_sm80", "hidden = act(x w_up^T + b_up), with mma.sync tiles"},
       {sm80_engine, {down}, "down_sm80", "y = hidden w_down^T with mma.sync tiles"},
       {cpu_stream_engine,
        {gate_up, down},
        "cpu_stream",
        "few tokens: every weight read from memory once"},
       {cpu_tiles_engine,
        {gate_up, down},
        "cpu_tiles",
        "register tiles of our own: packed tokens, gate and up fused with the activation"},
       {cpu_blas_engine,
        {gate_up, down},
        "cpu_blas",
        "blocks over OpenBLAS, gate, up and down fused per block or not"},
       {cpu_blas_engine,
        {up, down},
        "cpu_up_blas",
        "without a gate: blocks over OpenBLAS, each finished where it is made"},
       {simt_engine, {up}, "up_fallback", "hidden without a gate for any sizes and types"},
       {cpu_plain_engine,
        {up, down},
        "cpu_up_plain",
        "without a gate: plain loops for any sizes, the fallback"},
       {simt_engine,
        {gate_up},
        "gate_up_fallback",
        "hidden for any sizes, alignment and element type; no claim to speed"},
       {simt_engine,
        {down},
        "down_fallback",
        "y for any sizes, alignment and element type; no claim to speed"},
       {cpu_plain_engine, {gate_up, down}, "cpu_plain", plain_summary}});
  static const auto expansions =
      on_both(expand_family, cpu_expand_family, {gate_up_expansion, down_expansion});
  static const auto quantisations =
      on_both(quantise_family, cpu_quantise_family, {x_quantisation, hidden_quantisation});
  return addresses_of(families, expansions, quantisations);
}

std::vector<const Family*> backward_families() {
  static const auto families = families_of(
      {{sm90_engine,
        {d_hidden},
        "d_hidden_sm90",
        "dy w_down by wgmma, the gradients of gate and up from it"},
       {sm90_engine, {d_x}, "d_x_sm90", "wgmma, d_gate w_gate and d_up w_up in one accumulator"},
       {sm90_engine, {d_gate_up}, "d_gate_up_sm90", "wgmma, both products of x in one launch"},
       {sm90_engine, {d_down}, "d_down_sm90", "wgmma, dy and hidden read as their transposes"},
       {sm80_engine, {d_hidden, d_x, d_gate_up, d_down}, "{}_sm80", mma_sync_summary},
       {cpu_blas_engine,
        {gate_up_again},
        "cpu_gate_up_blas",
        "blocks over OpenBLAS, gate and up and their activation per block"},
       {cpu_blas_engine, {d_hidden, d_x, d_gate_up, d_down}, "cpu_{}_blas", blas_summary},
       {simt_engine, {d_hidden, d_x, d_gate_up, d_down}, "{}_fallback", simt_summary},
       {cpu_plain_engine, {gate_up_again}, "cpu_gate_up_plain", plain_summary},
       {cpu_plain_engine, {d_hidden, d_x, d_gate_up, d_down}, "cpu_{}_plain", plain_summary}});
  return addresses_of(families);
}

}  // namespace fftune::ffn
