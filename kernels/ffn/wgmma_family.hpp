// The family of the wgmma engine, for either stage.
#pragma once

#include "kernels/common/stage_family.hpp"
#include "kernels/ffn/cuda_stage.hpp"

namespace fftune::ffn {

class WgmmaFamily final : public StageFamily<CudaStage, DeviceKind::cuda> {
 public:
  /// `name` is its kernel's and its device source's too.
  using StageFamily::StageFamily;

  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  std::optional<double> estimate(const Problem&, const DeviceFacts&, const Config&) const override;
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override;
};

}  // namespace fftune::ffn
