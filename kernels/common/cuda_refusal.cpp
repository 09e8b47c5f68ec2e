#include "kernels/common/cuda_refusal.hpp"

#include <fmt/format.h>

namespace fftune {

std::optional<std::string> refuse_cuda(const Problem& problem, std::string_view pass,
                                       const DeviceFacts& facts) {
  if (facts.kind != DeviceKind::cuda) return "the kernel needs a CUDA device";
  if (problem.pass != pass)
    return fmt::format("the kernel computes the pass {}, not {}", pass, problem.pass);
  if (facts.compute_capability < 80)
    return fmt::format("the kernel needs compute capability 8.0 for bf16: {} has {}.{}", facts.name,
                       facts.compute_capability / 10, facts.compute_capability % 10);
  return std::nullopt;
}

}  // namespace fftune
