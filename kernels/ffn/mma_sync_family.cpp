#include "kernels/ffn/mma_sync_family.hpp"

#include "kernels/gemm/mma_sync.hpp"

namespace fftune::ffn {

std::optional<std::string> MmaSyncFamily::refusal(const Problem& problem,
                                                  const DeviceFacts& facts) const {
  return refuse_tensor_cores(problem, facts);
}

Space MmaSyncFamily::space(const Problem& problem, const DeviceFacts& facts) const {
  return mma_sync_space(gemm_of(stage_, problem), facts);
}

Config MmaSyncFamily::default_config(const Problem& problem, const DeviceFacts& facts) const {
  return mma_sync_default(gemm_of(stage_, problem), facts);
}

Program MmaSyncFamily::program(const Problem& problem, const DeviceFacts& facts,
                               const Config& config) const {
  Program program;
  program.kernels.push_back(
      kernel_source(stage_, std::string(name_), problem, mma_sync_template_arguments(config)));
  mma_sync_launch(program, gemm_of(stage_, problem), facts, config, tensor_arguments(stage_),
                  size_arguments(problem));
  return program;
}

std::vector<std::string> MmaSyncFamily::sources() const {
  return {"ffn/" + std::string(name_) + ".cu"};
}

}  // namespace fftune::ffn
