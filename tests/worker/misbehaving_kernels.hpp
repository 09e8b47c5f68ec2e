// The toy op by CUDA kernels; every fifth misbehaves as only a kernel can.
#pragma once

#include <string>
#include <vector>

#include "device/sources.hpp"
#include "support/toy_op.hpp"

namespace fftune::test {

/// illegal (an address that nothing is at), loop (without end), trap, beyond (just out of bounds,
/// in the guard region), wrong.
const std::vector<std::string>& kernel_ways();

constexpr int misbehaving_kernels = 25;
/// The fastest that keeps its word.
constexpr int misbehaving_kernels_best = 17;

/// The source that the family compiles.
const SourceSet& misbehaving_sources();

class MisbehavingKernels final : public WholeToyFamily {
 public:
  /// One of kernel_ways(), or "none", or "mixed": each of them in turn; or "vanishing": the process
  /// ends when the third but for the untuned one is made.
  explicit MisbehavingKernels(std::string way)
      : WholeToyFamily("odd_kernels", "some of it misbehaves", DeviceKind::cuda),
        way_(std::move(way)) {}

  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override { return {{"p", 0}}; }
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;

 private:
  std::string way_;
};

}  // namespace fftune::test
