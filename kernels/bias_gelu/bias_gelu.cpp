#include "kernels/bias_gelu/bias_gelu.hpp"

#include <algorithm>
#include <utility>

#include "device/parallel.hpp"
#include "kernels/common/activation.hpp"

namespace fftune::bias_gelu {
namespace {

/// Calls body(column) for every column, in parallel.
template <typename Body>
void for_each_column(std::size_t columns, Parallel& parallel, const Body& body) {
  constexpr std::size_t block = 64;  // of a row: a few cache lines
  parallel.run(static_cast<int>((columns + block - 1) / block), parallel.max_threads(),
               [&](int task) {
                 const std::size_t first = static_cast<std::size_t>(task) * block;
                 body(first, std::min(columns, first + block));
               });
}

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  const std::vector<std::int64_t> matrix{problem.size("m"), problem.size("h")};
  const std::vector<std::int64_t> row{problem.size("h")};
  const auto dtype = problem.dtype;
  const bool saves = saves_input(problem);
  const TensorSpec x{"x", dtype, matrix, Role::input, 1};
  const TensorSpec bias{"bias", bias_dtype(problem), row, Role::input, 0.5};
  if (problem.pass == "fwd") {
    std::vector<TensorSpec> tensors{x, bias, {"y", dtype, matrix, Role::output, 1}};
    if (saves) tensors.push_back({"input", dtype, matrix, Role::output, 1});
    return tensors;
  }
  std::vector<TensorSpec> tensors{x, bias};
  if (saves) tensors = {{"input", dtype, matrix, Role::input, 1}};
  tensors.push_back({"dy", dtype, matrix, Role::input, 1});
  tensors.push_back({"dx", dtype, matrix, Role::output, 1});
  if (is_frozen(problem)) return tensors;
  tensors.push_back({"dbias", bias_dtype(problem), row, Role::output, 1});
  tensors.back().sums_tokens = true;
  return tensors;
}

void complete_stage(const Problem& problem, StageSpec& stage) {
  const bool backward = problem.pass == "bwd";
  stage.reduction_length = backward && !is_frozen(problem) ? problem.size("m") : 1;
  stage.flops = static_cast<double>(problem.size("m")) * static_cast<double>(problem.size("h")) *
                (backward ? 4 : 2);
}

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const auto act = parse_activation(problem.option("act"));
  const auto m = static_cast<std::size_t>(problem.size("m"));
  const auto h = static_cast<std::size_t>(problem.size("h"));
  const bool backward = problem.pass == "bwd";
  const bool saves = saves_input(problem);
  const auto& x = tensors.at(backward && saves ? "input" : "x");
  const std::vector<double> none(h);
  const auto& bias = backward && saves ? none : tensors.at("bias");
  auto input = large_vector<double>(m * h, parallel);
  auto out = large_vector<double>(m * h, parallel);
  std::vector<double> sums(h);
  const double* const dy = backward ? tensors.at("dy").data() : nullptr;
  for_each_column(h, parallel, [&](std::size_t first, std::size_t last) {
    for (std::size_t row = 0; row < m; ++row)
      for (std::size_t column = first; column < last; ++column) {
        const std::size_t i = row * h + column;
        input[i] = x[i] + bias[column];
        out[i] = backward ? activation_gradient(act, input[i], dy[i]) : activate(act, input[i]);
        sums[column] += out[i];
      }
  });
  tensors[backward ? "dx" : "y"] = std::move(out);
  if (backward) tensors["dbias"] = std::move(sums);
  if (!backward && saves) tensors["input"] = std::move(input);
}

OpFacts facts() {
  return {
      .name = "bias-gelu",
      .summary = "y = gelu(x + bias)",
      .sizes = {row_tokens(), {.name = "h", .help = "features of a token", .example = 4096}},
      .options = {{"act", "which gelu: with erf, or its form with tanh", {"gelu", "gelu-tanh"}},
                  {"biases", "element type of bias and dbias: the op's, or f32", {"same", "f32"}},
                  {"save",
                   "kept by the forward pass for the backward pass: nothing but x, or gelu's input",
                   {"nothing", "input"},
                   true},
                  frozen_option("biases")},
      .families = {cuda_families, cpu_families},
      .baselines = baselines,
      .stage = {.tensors = tensors_of, .complete = complete_stage, .reference = reference}};
}

}  // namespace

DType bias_dtype(const Problem& problem) {
  return problem.option("biases") == "f32" ? DType::f32 : problem.dtype;
}

bool saves_input(const Problem& problem) {
  return problem.has("save", "input");
}

}  // namespace fftune::bias_gelu

const fftune::Op& fftune::bias_gelu_op() {
  static const DescribedOp op(bias_gelu::facts());
  return op;
}
