// The fallbacks for every stage: they refuse no size and no type.
#include <fmt/format.h>

#include <utility>

#include "kernels/common/cuda_refusal.hpp"
#include "kernels/common/device_types.hpp"
#include "kernels/masked/cuda_stage.hpp"
#include "kernels/masked/families.hpp"

namespace fftune::masked {
namespace {

constexpr std::int64_t tile = 64;  // of either kernel, as are its 256 threads

class Fallback : public StageFallback<Stage, DeviceKind::cuda> {
 public:
  Fallback(Stage stage, std::string_view name)
      : StageFallback(stage, name, "any sizes, alignment and element type; no claim to speed") {}

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto refusal = refuse_stage(stage(), problem)) return refusal;
    return refuse_cuda(problem, problem.pass, facts);
  }
};

/// The products of each expert's tokens.
class ProductFallback final : public Fallback {
 public:
  using Fallback::Fallback;

  Program program(const Problem& problem, const DeviceFacts&, const Config&) const override {
    const StageProduct work = product_of(stage(), problem);
    Program program;
    program.kernels.push_back(
        {"masked/grouped_fallback.cu",
         fmt::format("fftune::grouped_fallback<{}, {}, {}>", template_arguments(work, problem),
                     work.shape.b_transposed, work.shape.terms)});
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
};

/// The sums over each expert's tokens.
class SumFallback final : public Fallback {
 public:
  using Fallback::Fallback;

  Program program(const Problem& problem, const DeviceFacts&, const Config&) const override {
    const StageSum work = sum_of(stage(), problem);
    Program program;
    program.kernels.push_back(
        {"masked/token_sum_fallback.cu",
         fmt::format("fftune::token_sum_fallback<{}, {}, {}>", element_type(problem.dtype),
                     work.sorted_a, work.sorted_b)});
    KernelLaunch launch;
    launch.grid.x = static_cast<std::uint32_t>(work.shape.results * ceil_div(work.shape.m, tile) *
                                               ceil_div(work.shape.n, tile));
    launch.block.x = 256;
    launch.arguments = pointer_arguments(work);
    launch.arguments.emplace_back(TensorArgument{work.mask});
    for (const std::int64_t size : {work.shape.m, work.shape.n, work.shape.k})
      launch.arguments.emplace_back(static_cast<std::int32_t>(size));
    program.steps.emplace_back(std::move(launch));
    return program;
  }

  std::vector<std::string> sources() const override { return {"masked/token_sum_fallback.cu"}; }
};

}  // namespace

std::vector<const Family*> linear_fallback_families() {
  static const ProductFallback linear(Stage::linear, "linear_fallback"),
      dx(Stage::dx, "dx_fallback");
  static const SumFallback dw(Stage::dw, "dw_fallback");
  return {&linear, &dx, &dw};
}
std::vector<const Family*> ffn_fallback_families() {
  static const ProductFallback gate_up(Stage::gate_up, "gate_up_fallback"),
      down(Stage::down, "down_fallback"), d_hidden(Stage::d_hidden, "d_hidden_fallback"),
      d_x(Stage::d_x, "d_x_fallback");
  static const SumFallback d_gate_up(Stage::d_gate_up, "d_gate_up_fallback"),
      d_down(Stage::d_down, "d_down_fallback");
  return {&gate_up, &down, &d_hidden, &d_x, &d_gate_up, &d_down};
}

}  // namespace fftune::masked
