#include <fmt/format.h>

#include "kernels/common/device_types.hpp"
#include "kernels/gemm/mma_sync.hpp"
#include "kernels/gemm/product_families.hpp"

namespace fftune {

std::optional<std::string> MmaSyncProduct::refusal(const Problem& problem,
                                                   const DeviceFacts& facts) const {
  if (auto refusal = refuse_stage(stage(), problem, facts, DeviceKind::cuda)) return refusal;
  if (problem.dtype != DType::bf16 && problem.dtype != DType::fp16)
    return fmt::format("mma.sync m16n8k16 multiplies bf16 and fp16, not {}",
                       dtype_name(problem.dtype));
  // As in the forward pass of ffn, where it was measured.
  constexpr std::int64_t most_tokens_beside_wgmma = 64;
  if (facts.compute_capability == 90 && problem.size("m") > most_tokens_beside_wgmma)
    return fmt::format(
        "with more than {} tokens mma.sync has half the rate of wgmma on compute capability 9.0",
        most_tokens_beside_wgmma);
  return refuse_rows(product(problem));
}

Space MmaSyncProduct::space(const Problem& problem, const DeviceFacts& facts) const {
  return mma_sync_space(product(problem).shape, facts);
}

Config MmaSyncProduct::default_config(const Problem& problem, const DeviceFacts& facts) const {
  return mma_sync_default(product(problem).shape, facts);
}

std::optional<double> MmaSyncProduct::estimate(const Problem& problem, const DeviceFacts& facts,
                                               const Config& config) const {
  if (facts.clock_hz <= 0) return std::nullopt;
  return mma_sync_cost(product(problem).shape, facts, config) / facts.clock_hz;
}

Program MmaSyncProduct::program(const Problem& problem, const DeviceFacts& facts,
                                const Config& config) const {
  const Product work = product(problem);
  const GemmShape& shape = work.shape;
  Program program;
  program.kernels.push_back(
      {"gemm/product_sm80.cu",
       fmt::format("fftune::product_sm80<{}, {}, {}, {}>", element_type(work.dtype),
                   epilogue_type(work), operands_type(work), mma_sync_template_arguments(config))});
  mma_sync_launch(program, shape, facts, config, pointer_arguments(work),
                  {shape.m, shape.n, shape.k});
  return program;
}

std::vector<std::string> MmaSyncProduct::sources() const {
  return {"gemm/product_sm80.cu"};
}

}  // namespace fftune
