#include "kernels/ffn/fallback_family.hpp"

#include <utility>

#include "kernels/common/cuda_refusal.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {

std::optional<std::string> FallbackFamily::refusal(const Problem& problem,
                                                   const DeviceFacts& facts) const {
  return refuse_cuda(problem, facts, stage());
}

Space FallbackFamily::space(const Problem&, const DeviceFacts&) const {
  return {};
}

Config FallbackFamily::default_config(const Problem&, const DeviceFacts&) const {
  return {};
}

Program FallbackFamily::program(const Problem& problem, const DeviceFacts&, const Config&) const {
  constexpr std::int64_t tile = 64;  // of fallback_gemm, as are its 256 threads
  const GemmShape shape = gemm_of(stage(), problem);
  // A block that quantises has all of the features that share a scale.
  const bool quantises = has_block_scales(problem) && stage() == CudaStage::gate_up;
  Program program;
  const std::string file(name());
  program.kernels.push_back(kernel_source(
      stage(), file, file + (is_quantised(problem) ? fp8_suffix(problem) : ""), problem));
  KernelLaunch launch;
  launch.grid.x = static_cast<std::uint32_t>(ceil_div(shape.m, tile) *
                                             ceil_div(shape.n, quantises ? scale_block : tile));
  launch.block.x = 256;
  launch.arguments = tensor_arguments(stage(), problem);
  for (const Argument& scale : scale_arguments(stage(), problem)) launch.arguments.push_back(scale);
  for (const std::int64_t size : size_arguments(problem))
    launch.arguments.emplace_back(static_cast<std::int32_t>(size));
  program.steps.emplace_back(std::move(launch));
  return program;
}

std::vector<std::string> FallbackFamily::sources() const {
  return {"ffn/" + std::string(name()) + ".cu"};
}

}  // namespace fftune::ffn
