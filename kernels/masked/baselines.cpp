// Calls that a user would make without fftune and without a host synchronisation: library products
// of all tokens for either expert. Forward, a selection of rows follows; backward, dy is zero for
// the tokens of the other expert.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/distribution.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/library_gemm.hpp"
#include "kernels/masked/masked.hpp"

namespace fftune::masked {
namespace {

constexpr const char* kernel_file = "masked/baselines.cu";
constexpr std::size_t experts[] = {0, 1};

/// A pipeline in the making.
struct Pipeline {
  Pipeline(const Op& op, const Problem& given, const DeviceFacts& on, const char* summary,
           std::vector<TensorSpec> extra)
      : problem(given), facts(on), places(op.tensors(given), extra) {
    baseline.name = "unfused";
    baseline.summary = summary;
    baseline.extra = std::move(extra);
    baseline.program.host_tensors = places.count();
    for (const GemmStage& stage : gemm_stages(given))
      stages.emplace_back(stage.name, stage.gemm(given));
  }

  /// The stage's GEMM of all tokens with an expert's tensors.
  GemmProblem gemm(std::string_view stage, std::size_t expert) const {
    const auto found = std::find_if(stages.begin(), stages.end(),
                                    [&](const auto& one) { return one.first == stage; });
    return of_group(found->second, expert);
  }

  void append(const GemmProblem& gemm, const std::vector<std::string_view>& outputs = {}) {
    append_library_gemms(baseline.program, gemm, places, outputs);
  }

  /// out_i = first_i where mask_i, else second_i, of tensors [m, columns]; without a name: zeros.
  void select(std::string_view first, std::string_view second, std::string_view out,
              std::int64_t columns);
  /// out [m, columns] = `sorted` with its rows in the order of the tokens.
  void restore(std::string_view sorted, std::string_view out, std::int64_t columns);
  /// "dy_own" = dy of the expert's tokens, zero for the others.
  void select_own_dy(std::size_t expert, std::int64_t columns) {
    select(expert == 0 ? "dy" : "", expert == 1 ? "dy" : "", "dy_own", columns);
  }

  const Problem& problem;
  const DeviceFacts& facts;
  TensorPlaces places;
  std::vector<std::pair<std::string_view, GemmProblem>> stages;
  Baseline baseline;
};

void Pipeline::select(std::string_view first, std::string_view second, std::string_view out,
                      std::int64_t columns) {
  const std::int64_t m = problem.size("m");
  if (facts.kind == DeviceKind::cuda) {
    constexpr std::uint32_t threads = 256;
    const auto elements = static_cast<std::int64_t>(16 / dtype_bytes(problem.dtype));
    append_kernel(baseline.program, kernel_file,
                  fmt::format("select_rows<{}>", element_type(problem.dtype)),
                  grid_of_matrix(m, columns, elements * threads), threads,
                  {tensor_of(places, "mask"), tensor_or_null(places.at(first)),
                   tensor_or_null(places.at(second)), tensor_of(places, out), m, columns});
    return;
  }
  const std::size_t row_bytes = static_cast<std::size_t>(columns) * dtype_bytes(problem.dtype);
  const std::size_t mask = places.at("mask"), of_marked = places.at(first),
                    of_others = places.at(second), to = places.at(out);
  baseline.program.steps.emplace_back(HostFunction([=](const HostCall& call) {
    call.parallel.run(static_cast<int>(m), call.parallel.max_threads(), [&](int row) {
      const bool marked = static_cast<const std::uint8_t*>(call.tensors[mask])[row] != 0;
      const std::size_t from = marked ? of_marked : of_others;
      const std::size_t at = static_cast<std::size_t>(row) * row_bytes;
      std::byte* const target = static_cast<std::byte*>(call.tensors[to]) + at;
      if (from != absent)
        std::copy_n(static_cast<const std::byte*>(call.tensors[from]) + at, row_bytes, target);
      else
        std::fill_n(target, row_bytes, std::byte{0});
    });
  }));
}

void Pipeline::restore(std::string_view sorted, std::string_view out, std::int64_t columns) {
  const std::int64_t m = problem.size("m");
  if (facts.kind == DeviceKind::cuda) {
    const auto blocks = std::min<std::int64_t>(m, 8 * std::max(facts.multiprocessors, 1));
    append_kernel(baseline.program, kernel_file,
                  fmt::format("restore_rows<{}>", element_type(problem.dtype)),
                  {static_cast<std::uint32_t>(blocks)}, 256,
                  {tensor_of(places, "mask"), tensor_of(places, sorted), tensor_of(places, out),
                   static_cast<std::int32_t>(m), columns});
    return;
  }
  const std::size_t row_bytes = static_cast<std::size_t>(columns) * dtype_bytes(problem.dtype);
  const std::size_t mask = places.at("mask"), from = places.at(sorted), to = places.at(out);
  baseline.program.steps.emplace_back(HostFunction([=](const HostCall& call) {
    const auto* marks = static_cast<const std::uint8_t*>(call.tensors[mask]);
    const auto order = sorted_by_mark({marks, marks + m});
    for (std::size_t row = 0; row < order.size(); ++row)
      std::copy_n(static_cast<const std::byte*>(call.tensors[from]) + row * row_bytes, row_bytes,
                  static_cast<std::byte*>(call.tensors[to]) +
                      static_cast<std::size_t>(order[row]) * row_bytes);
  }));
}

Baseline linear_forward(const Problem& problem, const DeviceFacts& facts) {
  const std::int64_t m = problem.size("m"), n = problem.size("n");
  Pipeline by(masked_linear_op(), problem, facts,
              "the product of all tokens by either expert's weights, and a selection",
              {{"y_false", problem.dtype, {m, n}, Role::intermediate, 1}});
  by.append(by.gemm("linear", 0));
  by.append(by.gemm("linear", 1), {"y_false"});
  by.select("y", "y_false", "y", n);
  return by.baseline;
}

Baseline linear_backward(const Problem& problem, const DeviceFacts& facts) {
  const std::int64_t m = problem.size("m"), n = problem.size("n");
  Pipeline by(masked_linear_op(), problem, facts,
              "for either expert dy of its tokens, else zeros, and two library products",
              {{"dy_own", problem.dtype, {m, n}, Role::intermediate, 1}});
  for (const std::size_t expert : experts) {
    by.select_own_dy(expert, n);
    for (const auto& [stage, gemm] : by.stages) {
      GemmProblem own = of_group(gemm, expert);
      own.a = {{"dy_own"}};
      if (stage == "dx" && expert == 1) own.epilogue.source = own.c;
      by.append(own);
    }
  }
  return by.baseline;
}

Baseline ffn_forward(const Problem& problem, const DeviceFacts& facts) {
  const std::int64_t m = problem.size("m"), d = problem.size("d"), h = problem.size("h");
  const DType dtype = problem.dtype;
  Pipeline by(masked_ffn_op(), problem, facts,
              "for all tokens both experts: three products and an act * mul each; selection",
              {{"gate_of_tokens", dtype, {m, h}, Role::intermediate, 1},
               {"up_of_tokens", dtype, {m, h}, Role::intermediate, 1},
               {"y_false", dtype, {m, d}, Role::intermediate, 1}});
  for (const std::size_t expert : experts) {
    by.append(by.gemm(ffn::stage_gate_up, expert), {"gate_of_tokens", "up_of_tokens"});
    ffn::append_act_mul(by.baseline.program, problem, facts, by.places, "gate_of_tokens",
                        "up_of_tokens");
    by.append(by.gemm(ffn::stage_down, expert), {expert == 0 ? "y" : "y_false"});
  }
  by.select("y", "y_false", "y", d);
  return by.baseline;
}

Baseline ffn_backward(const Problem& problem, const DeviceFacts& facts) {
  const std::int64_t m = problem.size("m"), d = problem.size("d"), h = problem.size("h");
  const DType dtype = problem.dtype;
  std::vector<TensorSpec> extra = ffn::gradient_extra(problem);
  extra.push_back({"dy_own", dtype, {m, d}, Role::intermediate, 1});
  for (const char* name : {"gate_of_tokens", "up_of_tokens"})
    extra.push_back({name, dtype, {m, h}, Role::intermediate, 1});
  Pipeline by(masked_ffn_op(), problem, facts,
              "for either expert dy of its tokens, else zeros, library products and the gradients "
              "of gate and up",
              std::move(extra));
  if (!recomputes(problem)) {
    by.restore("gate", "gate_of_tokens", h);
    by.restore("up", "up_of_tokens", h);
  }
  for (const std::size_t expert : experts) {
    if (recomputes(problem))
      by.append(by.gemm(ffn::stage_gate_up, expert), {"gate_of_tokens", "up_of_tokens"});
    by.select_own_dy(expert, d);
    GemmProblem d_hidden = by.gemm(ffn::stage_d_hidden, expert),
                d_x = by.gemm(ffn::stage_d_x, expert);
    d_hidden.a = {{"dy_own"}};
    if (expert == 1) d_x.epilogue.source = d_x.c;
    by.append(d_hidden, {"dc"});
    ffn::append_gate_gradient(by.baseline.program, problem, facts, by.places, "gate_of_tokens",
                              "up_of_tokens");
    by.append(d_x);
    if (is_frozen(problem)) continue;
    by.append(by.gemm(ffn::stage_d_gate_up, expert));
    GemmProblem d_down = by.gemm(ffn::stage_d_down, expert);
    d_down.a = {{"dy_own"}};
    by.append(d_down);
  }
  return by.baseline;
}

}  // namespace

std::vector<Baseline> linear_baselines(const Problem& problem, const DeviceFacts& facts) {
  return {problem.pass == "bwd" ? linear_backward(problem, facts) : linear_forward(problem, facts)};
}

std::vector<Baseline> ffn_baselines(const Problem& problem, const DeviceFacts& facts) {
  return {problem.pass == "bwd" ? ffn_backward(problem, facts) : ffn_forward(problem, facts)};
}

}  // namespace fftune::masked
