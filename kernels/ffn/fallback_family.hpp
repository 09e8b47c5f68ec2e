// The family of the fallback engine, for either stage: it refuses no size and no type.
#pragma once

#include "kernels/common/stage_family.hpp"
#include "kernels/ffn/cuda_stage.hpp"

namespace fftune::ffn {

class FallbackFamily final : public StageFallback<CudaStage, DeviceKind::cuda> {
 public:
  /// `name` is its kernel's and its device source's too.
  using StageFallback::StageFallback;

  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override;
};

}  // namespace fftune::ffn
