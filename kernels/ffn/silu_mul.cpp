#include "kernels/ffn/silu_mul.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/ffn/cuda_stage.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {
namespace {

Argument argument_of(const Pointer& pointer) {
  return std::visit([](const auto& place) { return Argument{place}; }, pointer);
}

}  // namespace

void append_silu_mul(Program& program, const Problem& problem, const Pointer& gate,
                     const std::optional<Pointer>& up, const Pointer& out) {
  constexpr std::int64_t threads = 256, most_grid_rows = 65535;
  const Shape shape = shape_of(problem);
  const auto elements = static_cast<std::int64_t>(16 / dtype_bytes(problem.dtype));
  program.kernels.push_back(
      {"ffn/silu_mul.cu", fmt::format("fftune::silu_mul<{}, {}>", element_type(problem.dtype),
                                      activation_type(problem))});
  KernelLaunch launch;
  launch.kernel = program.kernels.size() - 1;
  launch.grid.x = static_cast<std::uint32_t>(ceil_div(shape.h, elements * threads));
  launch.grid.y = static_cast<std::uint32_t>(std::min(shape.m, most_grid_rows));
  launch.block.x = threads;
  launch.arguments = {argument_of(gate), up ? argument_of(*up) : Argument{std::int64_t{0}},
                      argument_of(out), shape.m, shape.h};
  program.steps.emplace_back(std::move(launch));
}

}  // namespace fftune::ffn
