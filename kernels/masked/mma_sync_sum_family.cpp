// The family of the mma.sync engine's sums over each expert's tokens.
#include <fmt/format.h>

#include <utility>

#include "kernels/common/device_types.hpp"
#include "kernels/gemm/mma_sync.hpp"
#include "kernels/masked/cuda_stage.hpp"
#include "kernels/masked/families.hpp"

namespace fftune::masked {
namespace {

class MmaSyncSumFamily final : public StageFamily {
 public:
  MmaSyncSumFamily(Stage stage, std::string_view name)
      : StageFamily(stage, name,
                    "mma.sync over each expert's tokens, which cp.async gathers; both experts in "
                    "one launch") {}

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto refusal = refuse_stage(stage(), problem)) return refusal;
    return refuse_mma_sync(problem, facts);
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return mma_sync_space(halved(sum_of(stage(), problem).shape), facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return mma_sync_default(halved(sum_of(stage(), problem).shape), facts);
  }

  std::optional<double> estimate(const Problem& problem, const DeviceFacts& facts,
                                 const Config& config) const override {
    if (facts.clock_hz <= 0) return std::nullopt;
    return mma_sync_cost(halved(sum_of(stage(), problem).shape), facts, config) / facts.clock_hz;
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const StageSum work = sum_of(stage(), problem);
    const GemmShape& shape = work.shape;
    Program program;
    program.scratch = {{static_cast<std::size_t>(shape.k + 1) * sizeof(std::uint32_t), false}};
    program.kernels.push_back({"masked/token_sum_sm80.cu", "fftune::order_tokens"});
    KernelLaunch order;
    order.grid.x = static_cast<std::uint32_t>(ceil_div(shape.k, 256));
    order.block.x = 256;
    order.arguments = {TensorArgument{work.mask}, ScratchArgument{0},
                       static_cast<std::int32_t>(shape.k)};
    program.steps.emplace_back(std::move(order));
    program.kernels.push_back(
        {"masked/token_sum_sm80.cu",
         fmt::format("fftune::token_sum_sm80<{}, fftune::linear_epilogue<false, {}>, {}, {}, {}, "
                     "{}>",
                     element_type(problem.dtype), !work.addends[0].empty(), work.sorted_a,
                     work.sorted_b, work.a.size(), mma_sync_template_arguments(config))});
    std::vector<Argument> tensors = pointer_arguments(work);
    tensors.emplace_back(ScratchArgument{0});
    mma_sync_launch(program, shape, facts, config, tensors, {shape.m, shape.n, shape.k});
    return program;
  }

  std::vector<std::string> sources() const override { return {"masked/token_sum_sm80.cu"}; }
};

}  // namespace

std::vector<const Family*> linear_sm80_sum_families() {
  static const MmaSyncSumFamily dw(Stage::dw, "dw_sm80");
  return {&dw};
}
std::vector<const Family*> ffn_sm80_sum_families() {
  static const MmaSyncSumFamily d_gate_up(Stage::d_gate_up, "d_gate_up_sm80"),
      d_down(Stage::d_down, "d_down_sm80");
  return {&d_gate_up, &d_down};
}

}  // namespace fftune::masked
