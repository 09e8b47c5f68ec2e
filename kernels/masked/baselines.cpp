#include "kernels/masked/baselines.hpp"
#include "kernels/masked/baseline_steps.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/common/activation.hpp"
#include "kernels/common/cpu_vector.hpp"
#include "kernels/common/device_types.hpp"
#include "kernels/masked/masked.hpp"

namespace fftune::masked {
namespace {

/// hidden = act(gate) * up.
void append_gate(Program& program, const Problem& problem, const DeviceFacts& facts,
                 std::size_t gate, std::size_t up, std::size_t hidden) {
  const std::int64_t m = problem.size("m"), h = problem.size("h");
  const std::string& act = problem.option("act");
  if (facts.kind == DeviceKind::cuda) {
    program.kernels.push_back(
        {"ffn/silu_mul.cu",
         fmt::format("fftune::silu_mul<{}, fftune::{}>", element_type(problem.dtype),
                     act == "gelu-tanh" ? "gelu_tanh" : act)});
    KernelLaunch launch = rows_launch(program, problem.dtype, m, h);
    launch.arguments = {TensorArgument{gate}, TensorArgument{up}, TensorArgument{hidden}, m, h};
    program.steps.emplace_back(std::move(launch));
    return;
  }
  const auto activation = parse_activation(act);
  const VectorKernels& kernels = vector_kernels(facts.arch);
  program.steps.emplace_back(
      HostFunction([=, dtype = problem.dtype, &kernels](const HostCall& call) {
        constexpr std::int64_t chunk = 4096;
        call.parallel.run(
            static_cast<int>(ceil_div(m * h, chunk)), call.parallel.max_threads(), [&](int task) {
              const std::int64_t first = task * chunk;
              const auto count = static_cast<std::size_t>(std::min(chunk, m * h - first));
              const auto place = [&](std::size_t tensor) {
                return static_cast<std::byte*>(call.tensors[tensor]) +
                       static_cast<std::size_t>(first) * dtype_bytes(dtype);
              };
              float gates[chunk], ups[chunk];
              decode(dtype, place(gate), {gates, count});
              decode(dtype, place(up), {ups, count});
              kernels.gated(activation, gates, ups, gates, count);
              encode(dtype, {gates, count}, place(hidden));
            });
      }));
}

LibraryGemm product(DType dtype, const GemmShape& shape, std::size_t a, std::size_t b,
                    std::size_t c) {
  return {
      dtype, shape.m, shape.n, shape.k, TensorArgument{a}, TensorArgument{b}, TensorArgument{c}};
}

}  // namespace

std::vector<Baseline> linear_baselines(const Problem& problem, const DeviceFacts& facts) {
  if (problem.pass == "bwd") return linear_backward_baselines(problem, facts);
  const StageProduct work = product_of(Stage::linear, problem);
  const std::size_t y = work.c.front(), other = y + 1;
  Baseline baseline;
  baseline.name = "unfused";
  baseline.summary = "the product of all tokens by either expert's weights, and a selection";
  baseline.extra = {
      {"y_false", problem.dtype, {work.shape.m, work.shape.n}, Role::intermediate, 1}};
  auto& program = baseline.program;
  program.host_tensors = other + 1;
  program.steps.emplace_back(product(problem.dtype, work.shape, work.a.front(), work.b[0][0], y));
  program.steps.emplace_back(
      product(problem.dtype, work.shape, work.a.front(), work.b[1][0], other));
  append_select(program, problem, facts, work.mask, y, other, y, work.shape.n);
  return {baseline};
}

std::vector<Baseline> ffn_baselines(const Problem& problem, const DeviceFacts& facts) {
  if (problem.pass == "bwd") return ffn_backward_baselines(problem, facts);
  const StageProduct gate_up = product_of(Stage::gate_up, problem);
  const StageProduct down = product_of(Stage::down, problem);
  const std::size_t x = gate_up.a.front(), y = down.c.front(), hidden = gate_up.c.front();
  const std::size_t gate = hidden + 1, up = hidden + 2, other = hidden + 3;
  const std::int64_t m = problem.size("m"), d = problem.size("d"), h = problem.size("h");
  const DType dtype = problem.dtype;
  Baseline baseline;
  baseline.name = "unfused";
  baseline.summary = "for all tokens both experts: three products and an act * mul each; selection";
  baseline.extra = {{"gate", dtype, {m, h}, Role::intermediate, 1},
                    {"up", dtype, {m, h}, Role::intermediate, 1},
                    {"y_false", dtype, {m, d}, Role::intermediate, 1}};
  auto& program = baseline.program;
  program.host_tensors = other + 1;
  for (const std::size_t expert : {0, 1}) {
    program.steps.emplace_back(product(dtype, gate_up.shape, x, gate_up.b[expert][0], gate));
    program.steps.emplace_back(product(dtype, gate_up.shape, x, gate_up.b[expert][1], up));
    append_gate(program, problem, facts, gate, up, hidden);
    program.steps.emplace_back(
        product(dtype, down.shape, hidden, down.b[expert][0], expert == 0 ? y : other));
  }
  append_select(program, problem, facts, down.mask, y, other, y, d);
  return {baseline};
}

}  // namespace fftune::masked
