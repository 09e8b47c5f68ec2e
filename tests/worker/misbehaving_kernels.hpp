// The toy op by CUDA kernels; every fifth misbehaves as only a kernel can.
#pragma once

#include <string>
#include <vector>

#include "device/sources.hpp"
#include "registry/family.hpp"

namespace fftune::test {

/// illegal (an address that nothing is at), loop (without end), trap, beyond (just out of bounds,
/// in the guard region), wrong.
const std::vector<std::string>& kernel_ways();

constexpr int misbehaving_kernels = 25;
/// The fastest that keeps its word.
constexpr int misbehaving_kernels_best = 17;

/// The source that the family compiles.
const SourceSet& misbehaving_sources();

class MisbehavingKernels final : public Family {
 public:
  /// One of kernel_ways(), or "none", or "mixed": each of them in turn; or "vanishing": the process
  /// ends when the third but for the untuned one is made.
  explicit MisbehavingKernels(std::string way) : way_(std::move(way)) {}

  std::string_view name() const override { return "odd_kernels"; }
  std::string_view summary() const override { return "some of it misbehaves"; }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override { return {"first", "second"}; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override {
    return {};
  }
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override { return {{"p", 0}}; }
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override { return {}; }

 private:
  std::string way_;
};

}  // namespace fftune::test
