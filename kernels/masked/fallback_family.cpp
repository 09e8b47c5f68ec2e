// The fallback for every stage: it refuses no size and no type.
#include <fmt/format.h>

#include <utility>

#include "kernels/common/cuda_refusal.hpp"
#include "kernels/masked/cuda_stage.hpp"
#include "kernels/masked/families.hpp"

namespace fftune::masked {
namespace {

class FallbackFamily final : public Family {
 public:
  /// `name` and `summary` are string literals.
  FallbackFamily(Stage stage, std::string_view name, std::string_view summary)
      : stage_(stage), name_(name), summary_(summary) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  bool is_fallback() const override { return true; }
  std::vector<std::string> stages() const override { return {stage_name(stage_)}; }
  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto refusal = refuse_pass(stage_, problem)) return refusal;
    return refuse_cuda(problem, problem.pass, facts);
  }
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }

  Program program(const Problem& problem, const DeviceFacts&, const Config&) const override {
    constexpr std::int64_t tile = 64;
    const StageProduct work = product_of(stage_, problem);
    Program program;
    program.kernels.push_back(
        {"masked/grouped_fallback.cu",
         fmt::format("fftune::grouped_fallback<{}, {}>", template_arguments(stage_, problem),
                     work.shape.b_transposed)});
    KernelLaunch launch;
    launch.grid.x = static_cast<std::uint32_t>((ceil_div(work.shape.m, tile) + 1) *
                                               ceil_div(work.shape.n, tile));
    launch.block.x = 256;
    launch.arguments = pointer_arguments(work);
    for (const std::int64_t size : {work.shape.m, work.shape.n, work.shape.k})
      launch.arguments.emplace_back(static_cast<std::int32_t>(size));
    program.steps.emplace_back(std::move(launch));
    return program;
  }

  std::vector<std::string> sources() const override { return {"masked/grouped_fallback.cu"}; }

 private:
  Stage stage_;
  std::string_view name_;
  std::string_view summary_;
};

}  // namespace

const Family& linear_fallback_family() {
  static const FallbackFamily family(
      Stage::linear, "linear_fallback",
      "y for any sizes, alignment and element type; no claim to speed");
  return family;
}
const Family& dx_fallback_family() {
  static const FallbackFamily family(
      Stage::dx, "dx_fallback", "dx for any sizes, alignment and element type; no claim to speed");
  return family;
}
const Family& gate_up_fallback_family() {
  static const FallbackFamily family(
      Stage::gate_up, "gate_up_fallback",
      "hidden for any sizes, alignment and element type; no claim to speed");
  return family;
}
const Family& down_fallback_family() {
  static const FallbackFamily family(
      Stage::down, "down_fallback",
      "y for any sizes, alignment and element type; no claim to speed");
  return family;
}

}  // namespace fftune::masked
