#include "kernels/ffn/mma_sync_family.hpp"

#include <fmt/format.h>

#include "kernels/gemm/mma_sync.hpp"

namespace fftune::ffn {

std::optional<std::string> MmaSyncFamily::refusal(const Problem& problem,
                                                  const DeviceFacts& facts) const {
  if (auto refusal = refuse_tensor_cores(problem, facts, stage())) return refusal;
  // Measured on an H200: 440 TFLOP/s at best, where wgmma reaches 700 to 800; up to 64 tokens the
  // memory decides, and either may win.
  constexpr std::int64_t most_tokens_beside_wgmma = 64;
  if (facts.compute_capability == 90 && problem.size("m") > most_tokens_beside_wgmma)
    return fmt::format(
        "with more than {} tokens mma.sync has half the rate of wgmma on compute capability 9.0",
        most_tokens_beside_wgmma);
  return std::nullopt;
}

Space MmaSyncFamily::space(const Problem& problem, const DeviceFacts& facts) const {
  return mma_sync_space(gemm_of(stage(), problem), facts);
}

Config MmaSyncFamily::default_config(const Problem& problem, const DeviceFacts& facts) const {
  return mma_sync_default(gemm_of(stage(), problem), facts);
}

std::optional<double> MmaSyncFamily::estimate(const Problem& problem, const DeviceFacts& facts,
                                              const Config& config) const {
  if (facts.clock_hz <= 0) return std::nullopt;
  return mma_sync_cost(gemm_of(stage(), problem), facts, config) / facts.clock_hz;
}

Program MmaSyncFamily::program(const Problem& problem, const DeviceFacts& facts,
                               const Config& config) const {
  Program program;
  program.kernels.push_back(kernel_source(stage(), std::string(name()), std::string(name()),
                                          problem, mma_sync_template_arguments(config)));
  mma_sync_launch(program, gemm_of(stage(), problem), facts, config,
                  tensor_arguments(stage(), problem), size_arguments(problem));
  return program;
}

std::vector<std::string> MmaSyncFamily::sources() const {
  return {"ffn/" + std::string(name()) + ".cu"};
}

}  // namespace fftune::ffn
