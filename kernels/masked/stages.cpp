#include "kernels/masked/masked.hpp"

#include <algorithm>

#include "core/distribution.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/linear/linear.hpp"

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
    gemm.groups.random = pattern->kind == Pattern::Kind::random;
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

// Summaries of several families.
constexpr const char* mma_sync_sums =
    "mma.sync over each expert's tokens, which cp.async gathers; both experts in one launch";
constexpr const char* fallback = "any sizes, alignment and element type; no claim to speed";
constexpr const char* blas = "blocks over OpenBLAS, each of one expert's tokens gathered";
constexpr const char* blas_sums = "blocks over OpenBLAS, each summing over one expert's tokens";

constexpr GemmStage product{"linear", masked_linear_op, grouped<linear::product_gemm>};
constexpr GemmStage dx{"dx", masked_linear_op, grouped<linear::d_x_gemm>};
constexpr GemmStage dw{"dw", masked_linear_op, grouped<linear::d_w_gemm>};

constexpr GemmStage gate_up{ffn::stage_gate_up, masked_ffn_op, grouped<ffn::gate_up_gemm>};
/// On the CPU the forward pass has its own families for gate_up and down together.
constexpr GemmStage gate_up_again{ffn::stage_gate_up, masked_ffn_op, grouped<ffn::gate_up_gemm>,
                                  "bwd"};
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
  const bool frozen = is_frozen(problem);
  if (problem.op == "masked-linear")
    return !backward ? std::vector{product} : frozen ? std::vector{dx} : std::vector{dx, dw};
  if (!backward) return {gate_up, down};
  std::vector<GemmStage> stages{d_hidden, d_x};
  if (recomputes(problem)) stages.insert(stages.begin(), gate_up);
  if (!frozen) stages.insert(stages.end(), {d_gate_up, d_down});
  return stages;
}

std::vector<const Family*> linear_families() {
  static const auto families = families_of(
      {{sm90_engine,
        {product},
        "linear_sm90",
        "y in tiles of one expert's tokens, with TMA and wgmma"},
       {sm90_engine,
        {dx},
        "dx_sm90",
        "dx in tiles of one expert's tokens, weights read as their transposes by wgmma"},
       {sm90_engine,
        {dw},
        "dw_sm90",
        "wgmma over each expert's tokens, dy and x read as their transposes; both dw in one "
        "launch"},
       {sm80_engine, {product}, "linear_sm80", "y in tiles of one expert's tokens, with mma.sync"},
       {sm80_engine,
        {dx},
        "dx_sm80",
        "dx in tiles of one expert's tokens, weights read as their transposes by ldmatrix.trans"},
       {sm80_engine, {dw}, "dw_sm80", mma_sync_sums},
       {simt_engine, {product, dx, dw}, "{}_fallback", fallback},
       {cpu_blas_engine, {product}, "cpu_blas", blas},
       {cpu_blas_engine, {dx}, "cpu_dx_blas", blas},
       {cpu_blas_engine, {dw}, "cpu_dw_blas", blas_sums},
       {cpu_plain_engine, {product}, "cpu_plain", plain_summary},
       {cpu_plain_engine, {dx, dw}, "cpu_{}_plain", plain_summary}});
  return addresses_of(families);
}

std::vector<const Family*> ffn_families() {
  static const auto families = families_of(
      {{sm90_engine,
        {gate_up},
        "gate_up_sm90",
        "hidden in tiles of one expert's tokens, x read once for both products, with TMA and "
        "wgmma"},
       {sm90_engine,
        {down},
        "down_sm90",
        "y from tiles of one expert's hidden, with TMA and wgmma"},
       {sm90_engine,
        {d_hidden},
        "d_hidden_sm90",
        "dy w_down in tiles of one expert's tokens by wgmma, the gradients of gate and up from it"},
       {sm90_engine,
        {d_x},
        "d_x_sm90",
        "wgmma over tiles of one expert's tokens, both products in one accumulator"},
       {sm90_engine,
        {d_gate_up},
        "d_gate_up_sm90",
        "wgmma over each expert's tokens, both products of x of both experts in one launch"},
       {sm90_engine,
        {d_down},
        "d_down_sm90",
        "wgmma over each expert's tokens, dy and hidden read as their transposes"},
       {sm80_engine,
        {gate_up},
        "gate_up_sm80",
        "hidden in tiles of one expert's tokens, x read once for both products, with mma.sync"},
       {sm80_engine, {down}, "down_sm80", "y from tiles of one expert's hidden, with mma.sync"},
       {sm80_engine,
        {d_hidden},
        "d_hidden_sm80",
        "dy w_down in tiles of one expert's tokens by mma.sync, the gradients of gate and up from "
        "it"},
       {sm80_engine,
        {d_x},
        "d_x_sm80",
        "mma.sync over tiles of one expert's tokens, both products in one accumulator"},
       {sm80_engine, {d_gate_up, d_down}, "{}_sm80", mma_sync_sums},
       {simt_engine, {gate_up, down, d_hidden, d_x, d_gate_up, d_down}, "{}_fallback", fallback},
       {cpu_blas_engine, {gate_up, down}, "cpu_blas", blas},
       {cpu_blas_engine, {gate_up_again, d_hidden, d_x}, "cpu_{}_blas", blas},
       {cpu_blas_engine, {d_gate_up, d_down}, "cpu_{}_blas", blas_sums},
       {cpu_plain_engine, {gate_up, down}, "cpu_plain", plain_summary},
       {cpu_plain_engine,
        {gate_up_again, d_hidden, d_x, d_gate_up, d_down},
        "cpu_{}_plain",
        plain_summary}});
  return addresses_of(families);
}

}  // namespace fftune::masked
