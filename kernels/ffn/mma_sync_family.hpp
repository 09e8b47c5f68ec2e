// The family of the mma.sync engine, for either stage.
#pragma once

#include "kernels/ffn/cuda_stage.hpp"
#include "registry/family.hpp"

namespace fftune::ffn {

class MmaSyncFamily : public Family {
 public:
  /// `name` is the family's, its kernel's and its device source's; a string literal.
  MmaSyncFamily(CudaStage stage, std::string_view name, std::string_view summary)
      : stage_(stage), name_(name), summary_(summary) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override { return {stage_name(stage_)}; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  std::optional<double> estimate(const Problem&, const DeviceFacts&, const Config&) const override;
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override;

 private:
  CudaStage stage_;
  std::string_view name_;
  std::string_view summary_;
};

}  // namespace fftune::ffn
