// The fallback for the weights' gradients.
#include <fmt/format.h>

#include <utility>

#include "kernels/common/cuda_refusal.hpp"
#include "kernels/common/device_types.hpp"
#include "kernels/masked/cuda_stage.hpp"
#include "kernels/masked/families.hpp"

namespace fftune::masked {
namespace {

class DwFallback final : public Family {
 public:
  std::string_view name() const override { return "dw_fallback"; }
  std::string_view summary() const override {
    return "dw_true and dw_false for any sizes, alignment and element type; no claim to speed";
  }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  bool is_fallback() const override { return true; }
  std::vector<std::string> stages() const override { return {stage_name(Stage::dw)}; }
  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto refusal = refuse_pass(Stage::dw, problem)) return refusal;
    return refuse_cuda(problem, problem.pass, facts);
  }
  Space space(const Problem&, const DeviceFacts&) const override { return {}; }
  Config default_config(const Problem&, const DeviceFacts&) const override { return {}; }

  Program program(const Problem& problem, const DeviceFacts&, const Config&) const override {
    constexpr std::int64_t tile = 64;
    const std::int64_t m = problem.size("m"), n = problem.size("n"), k = problem.size("k");
    Program program;
    program.kernels.push_back(
        {"masked/backward_fallback.cu",
         fmt::format("fftune::dw_fallback<{}>", element_type(problem.dtype))});
    KernelLaunch launch;
    launch.grid.x = static_cast<std::uint32_t>(2 * ceil_div(n, tile) * ceil_div(k, tile));
    launch.block.x = 256;
    const LinearPlaces at = linear_places(problem);
    for (const std::size_t place : {at.dy, at.x, at.mask})
      launch.arguments.emplace_back(TensorArgument{place});
    for (const std::size_t place : at.dw_before) {
      if (accumulates(problem))
        launch.arguments.emplace_back(TensorArgument{place});
      else
        launch.arguments.emplace_back(std::int64_t{0});
    }
    for (const std::size_t place : at.dw) launch.arguments.emplace_back(TensorArgument{place});
    for (const std::int64_t size : {m, n, k})
      launch.arguments.emplace_back(static_cast<std::int32_t>(size));
    program.steps.emplace_back(std::move(launch));
    return program;
  }

  std::vector<std::string> sources() const override { return {"masked/backward_fallback.cu"}; }
};

}  // namespace

const Family& dw_fallback_family() {
  static const DwFallback family;
  return family;
}

}  // namespace fftune::masked
