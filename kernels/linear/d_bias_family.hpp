// What the families of a linear layer's bias gradient have alike.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/linear/stages.hpp"
#include "registry/family.hpp"

namespace fftune::linear {

/// The only one of its kind of device, so a fallback, without parameters.
template <DeviceKind kind>
class DBiasFamily : public Family {
 public:
  DeviceKind device_kind() const override { return kind; }
  std::vector<std::string> stages() const override { return {stage_d_bias}; }
  bool is_fallback() const override { return true; }
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if constexpr (kind == DeviceKind::cuda) {
      if (auto refusal = refuse_cuda(problem, "bwd", facts)) return refusal;
    } else {
      if (facts.kind != kind) return "it runs on the CPU";
      if (!form_of(problem).backward) return "it computes the pass bwd, not " + problem.pass;
    }
    if (!form_of(problem).bias) return "there is no bias to have a gradient";
    return std::nullopt;
  }
};

}  // namespace fftune::linear
