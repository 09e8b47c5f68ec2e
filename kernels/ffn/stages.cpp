#include "kernels/ffn/stages.hpp"

#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {
namespace {

constexpr GemmStage gate_up{stage_gate_up, ffn_op, gate_up_gemm};
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

Scaling scaling_of(const Problem& problem) {
  if (!is_quantised(problem)) return Scaling::none;
  return has_block_scales(problem) ? Scaling::block : Scaling::tensor;
}

}  // namespace

std::vector<GemmStage> gemm_stages(const Problem& problem) {
  if (problem.pass == "fwd") return {gate_up, down};
  if (recomputes(problem)) return {gate_up, d_hidden, d_x, d_gate_up, d_down};
  return {d_hidden, d_x, d_gate_up, d_down};
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
  return gemm;
}

GemmProblem down_gemm(const Problem& problem) {
  const auto [m, d, h] = shape_of(problem);
  const Form form = form_of(problem);
  GemmProblem gemm = gemm_of(problem, m, d, h);
  gemm.a = {{"hidden"}};
  gemm.b = {{"w_down"}};
  gemm.c = {{"y"}};
  if (form.bias) gemm.epilogue.bias = "b_down";
  if (form.residual) gemm.epilogue.source = {{"residual"}};
  if (is_quantised(problem))
    gemm.quantisation = {
        .scaling = scaling_of(problem), .a_scale = "hidden_scale", .b_scale = {"w_down_scale"}};
  gemm.follows = true;
  return gemm;
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
  if (!recomputes(problem)) gemm.epilogue.hidden = "hidden";
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

}  // namespace fftune::ffn
