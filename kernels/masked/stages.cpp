#include "kernels/masked/stages.hpp"

#include <algorithm>

#include "core/pattern.hpp"
#include "kernels/ffn/stages.hpp"
#include "kernels/linear/stages.hpp"
#include "kernels/masked/masked.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::masked {
namespace {

struct OfExperts {
  std::string_view name;
  std::array<std::string_view, 2> experts;
};
constexpr OfExperts tensors_of_experts[] = {
    {"w", {"w_true", "w_false"}},
    {"w_gate", {"w_gate_true", "w_gate_false"}},
    {"w_up", {"w_up_true", "w_up_false"}},
    {"w_down", {"w_down_true", "w_down_false"}},
    {"dw", {"dw_true", "dw_false"}},
    {"dw_gate", {"dw_gate_true", "dw_gate_false"}},
    {"dw_up", {"dw_up_true", "dw_up_false"}},
    {"dw_down", {"dw_down_true", "dw_down_false"}},
    {"dw_before", {"dw_true_before", "dw_false_before"}},
    {"dw_gate_before", {"dw_gate_true_before", "dw_gate_false_before"}},
    {"dw_up_before", {"dw_up_true_before", "dw_up_false_before"}},
    {"dw_down_before", {"dw_down_true_before", "dw_down_false_before"}},
};

void divide(std::vector<TensorNames>& matrices) {
  for (TensorNames& matrix : matrices) {
    const auto experts = of_experts(matrix.front());
    matrix.assign(experts.begin(), experts.end());
  }
}

/// The GEMM of the dense op over the tokens of either expert.
template <GemmProblem (*dense)(const Problem&)>
GemmProblem grouped(const Problem& problem) {
  GemmProblem gemm = dense(problem);
  const bool sums_tokens = gemm.a_major == Major::mn;
  gemm.groups = {
      .by = sums_tokens ? Grouping::reduction : Grouping::rows, .count = 2, .mask = "mask"};
  if (const auto pattern = parse_pattern(problem.option("mask"))) {
    const bool in_runs =
        pattern->kind == Pattern::Kind::block || pattern->kind == Pattern::Kind::tail;
    gemm.groups.expected_share = pattern->share;
    gemm.groups.scattered = !in_runs && pattern->share > 0 && pattern->share < 1;
  }
  gemm.a_sorted = is_sorted(gemm.a.front().front());
  gemm.b_sorted = sums_tokens && is_sorted(gemm.b.front().front());
  gemm.c_sorted = !sums_tokens && is_sorted(gemm.c.front().front());
  if (sums_tokens) {
    divide(gemm.c);
    divide(gemm.epilogue.source);
  } else {
    divide(gemm.b);
  }
  return gemm;
}

constexpr GemmStage product{"linear", masked_linear_op, grouped<linear::product_gemm>};
constexpr GemmStage dx{"dx", masked_linear_op, grouped<linear::d_x_gemm>};
constexpr GemmStage dw{"dw", masked_linear_op, grouped<linear::d_w_gemm>};

constexpr GemmStage gate_up{ffn::stage_gate_up, masked_ffn_op, grouped<ffn::gate_up_gemm>};
constexpr GemmStage down{ffn::stage_down, masked_ffn_op, grouped<ffn::down_gemm>};
constexpr GemmStage d_hidden{ffn::stage_d_hidden, masked_ffn_op, grouped<ffn::d_hidden_gemm>};
constexpr GemmStage d_x{ffn::stage_d_x, masked_ffn_op, grouped<ffn::d_x_gemm>};
constexpr GemmStage d_gate_up{ffn::stage_d_gate_up, masked_ffn_op, grouped<ffn::d_gate_up_gemm>};
constexpr GemmStage d_down{ffn::stage_d_down, masked_ffn_op, grouped<ffn::d_down_gemm>};

}  // namespace

std::array<std::string_view, 2> of_experts(std::string_view name) {
  for (const OfExperts& tensor : tensors_of_experts)
    if (tensor.name == name) return tensor.experts;
  return {name, name};
}

bool is_sorted(std::string_view name) {
  constexpr std::string_view sorted[] = {"gate", "up", "hidden", "d_gate", "d_up"};
  return std::find(std::begin(sorted), std::end(sorted), name) != std::end(sorted);
}

std::vector<GemmStage> gemm_stages(const Problem& problem) {
  const bool backward = problem.pass == "bwd";
  if (problem.op == "masked-linear") return backward ? std::vector{dx, dw} : std::vector{product};
  if (!backward) return {gate_up, down};
  if (ffn::recomputes(problem)) return {gate_up, d_hidden, d_x, d_gate_up, d_down};
  return {d_hidden, d_x, d_gate_up, d_down};
}

}  // namespace fftune::masked
