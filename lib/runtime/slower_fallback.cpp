#include "runtime/slower_fallback.hpp"

#include <algorithm>

#include "registry/catalog.hpp"

namespace fftune {
namespace {

/// FLOPs of an SM in a clock, at the peak: of the tensor cores for 16 bits, else of fp32 FMA.
double peak_flops_per_clock(const DeviceFacts& facts, DType dtype) {
  const int capability = facts.compute_capability;
  if (dtype == DType::f32) return capability == 80 ? 128 : 256;
  if (capability >= 120) return 1024;
  if (capability >= 100) return 8192;
  if (capability >= 90) return 4096;
  return capability == 80 ? 2048 : 1024;
}

/// A stage by PyTorch. Rows of 16 bits that are not aligned reach a small part of the peak, and
/// each kernel takes a launch. On an H200 k 4097 and n 4096 took 12.8 us for a token, 272 for 1,024
/// and 1,059 for 4,096; the fallback took 490, 2,885 and 10,624.
double pytorch_seconds(const StageSpec& stage, const DeviceFacts& facts, DType dtype) {
  constexpr double of_bandwidth = 0.3, launches = 12e-6;
  const double of_peak = dtype == DType::f32 ? 0.6 : 0.12;
  const double flops =
      of_peak * peak_flops_per_clock(facts, dtype) * facts.multiprocessors * facts.clock_hz;
  return launches +
         std::max(stage.flops / flops, stage.bytes / (of_bandwidth * facts.memory_bandwidth));
}

}  // namespace

std::optional<SlowerFallback> slower_fallback(const Op& op, const Problem& problem,
                                              const DeviceFacts& facts, const Recipe& recipe) {
  if (facts.kind != DeviceKind::cuda || facts.multiprocessors == 0 || facts.clock_hz == 0 ||
      facts.memory_bandwidth == 0)
    return std::nullopt;
  const Problem one = unrepeated(op, problem);
  const auto stages = op.stages(one);
  SlowerFallback found;
  for (const Variant& variant : recipe) {
    const Family& family = family_of(op, variant.family);
    if (!family.is_fallback()) continue;
    const auto seconds = family.estimate(one, facts, variant.config);
    if (!seconds) continue;
    found.seconds += *seconds;
    for (const std::string& name : family.stages()) {
      found.stages.push_back(name);
      for (const StageSpec& stage : stages)
        if (stage.name == name) found.pytorch_seconds += pytorch_seconds(stage, facts, one.dtype);
    }
  }
  if (found.seconds <= found.pytorch_seconds) return std::nullopt;
  return found;
}

}  // namespace fftune
