#include "cuda/device.hpp"

namespace fftune::testing {

Program one_launch(const char* file, const char* expression, Dim3 grid, Dim3 block,
                   std::vector<Argument> arguments) {
  Program program;
  program.kernels.push_back({file, expression});
  KernelLaunch launch;
  launch.grid = grid;
  launch.block = block;
  launch.arguments = std::move(arguments);
  program.steps.emplace_back(std::move(launch));
  return program;
}

Program scale_program(std::int64_t count, float by) {
  constexpr std::int64_t threads = 256;
  const auto blocks = static_cast<std::uint32_t>((count + threads - 1) / threads);
  return one_launch("test/scale.cu", "scale<256>", {blocks, 1, 1}, {256, 1, 1},
                    {TensorArgument{0}, TensorArgument{1}, by, count});
}

}  // namespace fftune::testing
