#include "kernels/ffn/baseline_steps.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/common/device_types.hpp"
#include "kernels/ffn/cuda_stage.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {
namespace {

/// A launch of the last kernel over [rows, columns], 16 bytes a thread.
KernelLaunch rows_launch(const Program& program, DType dtype, std::int64_t rows,
                         std::int64_t columns) {
  constexpr std::int64_t threads = 256, most_grid_rows = 65535;
  const auto elements = static_cast<std::int64_t>(16 / dtype_bytes(dtype));
  KernelLaunch launch;
  launch.kernel = program.kernels.size() - 1;
  launch.grid.x = static_cast<std::uint32_t>(ceil_div(columns, elements * threads));
  launch.grid.y = static_cast<std::uint32_t>(std::min(rows, most_grid_rows));
  launch.block.x = threads;
  return launch;
}

Argument or_null(bool present, std::size_t place) {
  return present ? Argument{TensorArgument{place}} : Argument{std::int64_t{0}};
}

}  // namespace

void append_silu_mul(Program& program, const Problem& problem, const Pointer& gate,
                     const std::optional<Pointer>& up, const Pointer& out) {
  const Shape shape = shape_of(problem);
  program.kernels.push_back(
      {"ffn/silu_mul.cu", fmt::format("fftune::silu_mul<{}, {}>", element_type(problem.dtype),
                                      activation_type(problem))});
  KernelLaunch launch = rows_launch(program, problem.dtype, shape.m, shape.h);
  launch.arguments = {argument_of(gate), up ? argument_of(*up) : Argument{std::int64_t{0}},
                      argument_of(out), shape.m, shape.h};
  program.steps.emplace_back(std::move(launch));
}

void append_add_rows(Program& program, const Problem& problem) {
  const Form form = form_of(problem);
  if (!form.adds()) return;
  const Shape shape = shape_of(problem);
  const Places at = places_of(problem);
  program.kernels.push_back(
      {"ffn/add_rows.cu", fmt::format("fftune::add_rows<{}>", element_type(problem.dtype))});
  KernelLaunch launch = rows_launch(program, problem.dtype, shape.m, shape.d);
  launch.arguments = {TensorArgument{at.y}, or_null(form.bias, at.b_down),
                      or_null(form.residual, at.residual), shape.m, shape.d};
  program.steps.emplace_back(std::move(launch));
}

}  // namespace fftune::ffn
