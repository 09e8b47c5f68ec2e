// What a user would call for the backward passes without a host synchronisation: library products
// of all tokens for either expert, whose dy is zero for the tokens of the other.
#include <fmt/format.h>

#include <utility>

#include "kernels/common/activation.hpp"
#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/device_types.hpp"
#include "kernels/masked/baseline_steps.hpp"
#include "kernels/masked/baselines.hpp"
#include "kernels/masked/masked.hpp"

namespace fftune::masked {
namespace {

/// dy of one expert's tokens, zero for the others.
void append_own_rows(Program& program, const Problem& problem, const DeviceFacts& facts,
                     std::size_t mask, std::size_t dy, std::size_t expert, std::size_t out,
                     std::int64_t columns) {
  using Place = std::optional<std::size_t>;
  append_select(program, problem, facts, mask, expert == 0 ? Place(dy) : Place(),
                expert == 1 ? Place(dy) : Place(), out, columns);
}

/// c [m,n] (+)= a [m,k] · b, stored [k,n].
LibraryGemm rows_product(const Problem& problem, std::int64_t n, std::int64_t k, std::size_t a,
                         std::size_t b, std::size_t c, bool accumulates) {
  return {.dtype = problem.dtype,
          .m = problem.size("m"),
          .n = n,
          .k = k,
          .a = TensorArgument{a},
          .b = TensorArgument{b},
          .c = TensorArgument{c},
          .b_transposed = true,
          .accumulates = accumulates};
}

/// dw [n,k] (+)= aᵀ·b over all tokens, a [m,n] and b [m,k]. What is added to is dw itself, as a
/// framework has it.
LibraryGemm token_sum(const Problem& problem, std::int64_t n, std::int64_t k, std::size_t a,
                      std::size_t b, std::size_t dw) {
  return {.dtype = problem.dtype,
          .m = n,
          .n = k,
          .k = problem.size("m"),
          .a = TensorArgument{a},
          .b = TensorArgument{b},
          .c = TensorArgument{dw},
          .a_transposed = true,
          .b_transposed = true,
          .accumulates = accumulates(problem)};
}

/// d_gate, d_up and hidden from dc, gate and up, all [m, h].
void append_gate_gradient(Program& program, const Problem& problem, const DeviceFacts& facts,
                          std::size_t dc, std::size_t gate, std::size_t up, const FfnPlaces& at) {
  const std::int64_t m = problem.size("m"), h = problem.size("h"), elements = m * h;
  if (facts.kind == DeviceKind::cuda) {
    const auto vector = static_cast<std::int64_t>(16 / dtype_bytes(problem.dtype));
    const std::int64_t count = elements % vector == 0 ? vector : 1;
    program.kernels.push_back(
        {"ffn/gate_gradient.cu",
         fmt::format("fftune::gate_gradient<{}, {}, {}>", element_type(problem.dtype),
                     activation_type(parse_activation(problem.option("act"))), count)});
    KernelLaunch launch;
    launch.kernel = program.kernels.size() - 1;
    launch.grid.x = static_cast<std::uint32_t>(ceil_div(elements, 256 * count));
    launch.block.x = 256;
    for (const std::size_t place : {dc, gate, up, at.d_gate, at.d_up, at.hidden})
      launch.arguments.emplace_back(TensorArgument{place});
    launch.arguments.emplace_back(elements);
    program.steps.emplace_back(std::move(launch));
    return;
  }
  const RowKernels* const loops = &row_kernels(facts.arch, problem.dtype);
  const auto activation = parse_activation(problem.option("act"));
  const std::size_t columns = static_cast<std::size_t>(h),
                    row_bytes = columns * dtype_bytes(problem.dtype);
  program.steps.emplace_back(HostFunction([=](const HostCall& call) {
    call.parallel.run(static_cast<int>(m), call.parallel.max_threads(), [&](int row) {
      const auto of = [&](std::size_t place) {
        return static_cast<std::byte*>(call.tensors[place]) +
               static_cast<std::size_t>(row) * row_bytes;
      };
      loops->act_mul_gradient(activation, of(gate), of(up), of(dc), of(at.d_gate), of(at.d_up),
                              columns, false);
      loops->act_mul(activation, of(gate), of(up), of(at.hidden), columns, false);
    });
  }));
}

}  // namespace

std::vector<Baseline> linear_backward_baselines(const Problem& problem, const DeviceFacts& facts) {
  const LinearPlaces at = linear_places(problem);
  const std::int64_t m = problem.size("m"), n = problem.size("n"), k = problem.size("k");
  const std::size_t own = at.dw[1] + 1;
  Baseline baseline;
  baseline.name = "unfused";
  baseline.summary = "for either expert dy of its tokens, else zeros, and two library products";
  baseline.extra = {{"dy_own", problem.dtype, {m, n}, Role::intermediate, 1}};
  Program& program = baseline.program;
  program.host_tensors = own + 1;
  for (const std::size_t expert : {0, 1}) {
    append_own_rows(program, problem, facts, at.mask, at.dy, expert, own, n);
    program.steps.emplace_back(rows_product(problem, k, n, own, at.w[expert], at.dx, expert == 1));
    program.steps.emplace_back(token_sum(problem, n, k, own, at.x, at.dw[expert]));
  }
  return {baseline};
}

std::vector<Baseline> ffn_backward_baselines(const Problem& problem, const DeviceFacts& facts) {
  const FfnPlaces at = ffn_places(problem);
  const std::int64_t m = problem.size("m"), d = problem.size("d"), h = problem.size("h");
  const std::size_t own = at.count, dc = own + 1, gate = own + 2, up = own + 3;
  Baseline baseline;
  baseline.name = "unfused";
  baseline.summary =
      "for either expert dy of its tokens, else zeros, library products and the gradients of gate "
      "and up";
  baseline.extra = {{"dy_own", problem.dtype, {m, d}, Role::intermediate, 1},
                    {"dc", problem.dtype, {m, h}, Role::intermediate, 1},
                    {"gate_of_tokens", problem.dtype, {m, h}, Role::intermediate, 1},
                    {"up_of_tokens", problem.dtype, {m, h}, Role::intermediate, 1}};
  Program& program = baseline.program;
  program.host_tensors = up + 1;
  if (!recomputes(problem)) {
    append_restore(program, problem, facts, at.mask, at.gate, gate, h);
    append_restore(program, problem, facts, at.mask, at.up, up, h);
  }
  for (const std::size_t expert : {0, 1}) {
    if (recomputes(problem))
      for (const auto& [weights, out] : {std::pair{at.w_gate, gate}, {at.w_up, up}})
        program.steps.emplace_back(LibraryGemm{.dtype = problem.dtype,
                                               .m = m,
                                               .n = h,
                                               .k = d,
                                               .a = TensorArgument{at.x},
                                               .b = TensorArgument{weights[expert]},
                                               .c = TensorArgument{out}});
    append_own_rows(program, problem, facts, at.mask, at.dy, expert, own, d);
    program.steps.emplace_back(rows_product(problem, h, d, own, at.w_down[expert], dc, false));
    append_gate_gradient(program, problem, facts, dc, gate, up, at);
    program.steps.emplace_back(
        rows_product(problem, d, h, at.d_gate, at.w_gate[expert], at.dx, expert == 1));
    program.steps.emplace_back(rows_product(problem, d, h, at.d_up, at.w_up[expert], at.dx, true));
    for (const auto& [gradient, dw] : {std::pair{at.d_gate, at.dw_gate}, {at.d_up, at.dw_up}})
      program.steps.emplace_back(token_sum(problem, h, d, gradient, at.x, dw[expert]));
    program.steps.emplace_back(token_sum(problem, d, h, own, at.hidden, at.dw_down[expert]));
  }
  return {baseline};
}

}  // namespace fftune::masked
