#include "kernels/ffn/fallback_family.hpp"

#include <utility>

namespace fftune::ffn {

std::optional<std::string> FallbackFamily::refusal(const Problem& problem,
                                                   const DeviceFacts& facts) const {
  return refuse_cuda(problem, facts);
}

Space FallbackFamily::space(const Problem&, const DeviceFacts&) const {
  return {};
}

Config FallbackFamily::default_config(const Problem&, const DeviceFacts&) const {
  return {};
}

Program FallbackFamily::program(const Problem& problem, const DeviceFacts&, const Config&) const {
  constexpr std::int64_t tile = 64;  // of fallback_gemm, as are its 256 threads
  const GemmShape shape = gemm_of(stage_, problem);
  Program program;
  program.kernels.push_back(kernel_source(stage_, std::string(name_), std::string(name_), problem));
  KernelLaunch launch;
  launch.grid.x = static_cast<std::uint32_t>(ceil_div(shape.m, tile) * ceil_div(shape.n, tile));
  launch.block.x = 256;
  launch.arguments = tensor_arguments(stage_, problem);
  for (const std::int64_t size : size_arguments(problem))
    launch.arguments.emplace_back(static_cast<std::int32_t>(size));
  program.steps.emplace_back(std::move(launch));
  return program;
}

std::vector<std::string> FallbackFamily::sources() const {
  return {"ffn/" + std::string(name_) + ".cu"};
}

}  // namespace fftune::ffn
