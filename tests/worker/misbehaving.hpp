// The toy op with one family of 200 variants on the CPU's own backend; 40 of them misbehave in a
// way that the test chooses.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/backend.hpp"
#include "registry/catalog.hpp"
#include "support/toy_op.hpp"
#include "worker/misbehaving_kernels.hpp"

namespace fftune::test {

/// The worker dies: segfault, abort, exit, killed (as for want of memory), sticky (the device is
/// lost), crash_compile. It never ends: hang. It writes where it must not: trample (far out of
/// bounds), beyond (just out of bounds). Its result is bad: wrong, nan, unwritten, moody (different
/// from run to run). Its time is: liar (fast at first, then slow).
const std::vector<std::string>& ways();

constexpr int misbehaving_variants = 200;
/// Number of variants in the way "crowd"; none of them misbehaves.
constexpr int crowd_variants = 10000;
/// The fastest that keeps its word.
constexpr int misbehaving_best = 77;
/// Every fifth one, the untuned first.
constexpr bool misbehaves(int p) {
  return p % 5 == 0;
}

class MisbehavingFamily final : public WholeToyFamily {
 public:
  /// A way, or "none", or "crowd", or "mixed": each of the ways in turn.
  explicit MisbehavingFamily(std::string way)
      : WholeToyFamily("odd", "some of it misbehaves"), way_(std::move(way)) {}

  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override { return {{"p", 0}}; }
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;

 private:
  std::string way_of(int p) const;

  std::string way_;
};

/// In the way "slow_reference" nothing misbehaves, but a reference takes minutes.
class MisbehavingOp final : public ToyOp {
 public:
  explicit MisbehavingOp(const std::string& way)
      : slow_reference_(way == "slow_reference"), family_(way), kernels_(way) {}
  std::vector<const Family*> families() const override { return {&family_, &kernels_}; }
  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override;

 private:
  bool slow_reference_;
  MisbehavingFamily family_;
  MisbehavingKernels kernels_;
};

inline const SourceSet no_sources{{}};

inline Problem misbehaving_problem() {
  return ToyOp::problem(DType::f32, 2, 16, 16);
}

/// The CPU's backend, but that variants tell what they take, so that nothing else on the machine
/// can change the order, and for ceilings that need no measuring.
std::unique_ptr<Backend> open_quick_cpu();

/// The same, but that everything takes `pace(samples)` times as long by its own account after so
/// many samples; it may also end the process. `at_limits` is called when its ceilings are asked
/// for.
std::unique_ptr<Backend> open_paced_cpu(
    std::function<double(int samples)> pace, std::function<void()> at_limits = [] {});

}  // namespace fftune::test
