#include "kernels/common/cuda_kernel.hpp"

#include <fmt/format.h>

namespace fftune {

std::optional<std::string> refuse_cuda(const Problem& problem, std::string_view pass,
                                       const DeviceFacts& facts) {
  if (facts.kind != DeviceKind::cuda) return "the kernel needs a CUDA device";
  if (problem.pass != pass)
    return fmt::format("the kernel computes the pass {}, not {}", pass, problem.pass);
  if (facts.compute_capability < 80)
    return fmt::format("the kernel needs compute capability 8.0: {} has {}.{}", facts.name,
                       facts.compute_capability / 10, facts.compute_capability % 10);
  return std::nullopt;
}

KernelLaunch& append_kernel(Program& program, const std::string& file,
                            const std::string& expression, Dim3 grid, std::uint32_t threads,
                            std::vector<Argument> arguments) {
  program.kernels.push_back({file, "fftune::" + expression});
  KernelLaunch launch;
  launch.kernel = program.kernels.size() - 1;
  launch.grid = grid;
  launch.block.x = threads;
  launch.arguments = std::move(arguments);
  program.steps.emplace_back(std::move(launch));
  return std::get<KernelLaunch>(program.steps.back());
}

KernelLaunch& append_pdl_kernel(Program& program, const DeviceFacts& facts, const std::string& file,
                                const std::string& expression, Dim3 grid, std::uint32_t threads,
                                std::vector<Argument> arguments) {
  KernelLaunch& launch =
      append_kernel(program, file, expression, grid, threads, std::move(arguments));
  launch.programmatic = facts.compute_capability >= 90;
  return launch;
}

Program pdl_program(const DeviceFacts& facts, const std::string& file,
                    const std::string& expression, Dim3 grid, std::uint32_t threads,
                    std::vector<Argument> arguments) {
  Program program;
  append_pdl_kernel(program, facts, file, expression, grid, threads, std::move(arguments));
  return program;
}

Dim3 grid_of_matrix(std::int64_t rows, std::int64_t columns, std::int64_t columns_of_block) {
  constexpr std::int64_t most_rows = 65535;
  return {static_cast<std::uint32_t>(quotient_up(columns, columns_of_block)),
          static_cast<std::uint32_t>(std::min(rows, most_rows)), 1};
}

void append_column_sum(Program& program, const DeviceFacts& facts, const std::string& file,
                       const std::string& name, DType dtype, ScratchArgument partial,
                       TensorArgument out, std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t columns_of_block = 32;
  constexpr std::uint32_t threads = 512;
  append_pdl_kernel(program, facts, file, fmt::format("{}<{}>", name, element_type(dtype)),
                    {static_cast<std::uint32_t>(quotient_up(columns, columns_of_block)), 1, 1},
                    threads, {partial, out, static_cast<std::int32_t>(rows), columns});
}

Space& add_vector(Space& space, std::int64_t element_bytes, std::int64_t widest,
                  const char* aligned) {
  return space.parameter("vector", "bytes of an access", {2, 4, 8, 16})
      .constraint(
          fmt::format("an access has at least one element, and {} are aligned to it", aligned),
          [=](const Config& c) {
            return c.at("vector") >= element_bytes && c.at("vector") <= widest;
          },
          {"vector"});
}

Space& add_wide_vector(Space& space, std::int64_t element_bytes, std::int64_t widest,
                       const char* aligned) {
  return add_vector(space, element_bytes, widest, aligned)
      .constraint("accesses narrower than half of what alignment allows only add instructions",
                  [=](const Config& c) { return 2 * c.at("vector") >= widest; }, {"vector"});
}

}  // namespace fftune
