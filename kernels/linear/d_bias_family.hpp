// What the families of a linear layer's bias gradient have alike.
#pragma once

#include "kernels/common/stage_family.hpp"
#include "kernels/linear/linear.hpp"

namespace fftune::linear {

template <DeviceKind kind>
class DBiasFamily : public StageFallback<ProductStage, kind> {
 public:
  DBiasFamily(std::string_view name, std::string_view summary)
      : StageFallback<ProductStage, kind>({stage_d_bias, "bwd", nullptr}, name, summary) {}

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto refusal = refuse_stage(this->stage(), problem, facts, kind)) return refusal;
    if (!form_of(problem).bias) return "there is no bias to have a gradient";
    return std::nullopt;
  }
};

}  // namespace fftune::linear
