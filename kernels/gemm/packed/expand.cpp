// The host side of expand.cu.
#include <fmt/format.h>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/gemm/packed/packed.hpp"

namespace fftune {
namespace {

constexpr const char* file = "gemm/packed/expand.cu";
constexpr std::int64_t warps = 4;  // expand_warps

class Expand final : public StageFamily {
 public:
  Expand(const ExpandStage& stage, const char* name)
      : StageFamily({.name = name,
                     .summary = "packed weights to dense ones, for products of many tokens",
                     .stage = stage.name,
                     .pass = "fwd",
                     .sources = {file},
                     .is_fallback = true}),
        stage_(stage) {}

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto reason = StageFamily::refusal(problem, facts)) return reason;
    return refuse_dense(problem);
  }
  Program program(const Problem& problem, const DeviceFacts& facts, const Config&) const override {
    const TensorPlaces places(stage_.op().tensors(problem));
    Program program;
    for (const PackedWeight& weight : stage_.weights(problem)) {
      const std::int64_t blocks = packed_blocks(weight.n, weight.k) - 1;
      KernelLaunch& launch = append_kernel(
          program, file,
          fmt::format("expand_weight<{}, {}>", element_type(weight.dtype),
                      device_name(weight.format.code)),
          {static_cast<std::uint32_t>(quotient_up(blocks, warps))}, 32 * warps,
          {tensor_of(places, weight.codes), tensor_of(places, weight.scales),
           tensor_or_null(places, weight.zeros), tensor_of(places, weight.dense), weight.n,
           weight.k, weight.format.group == 0 ? weight.k : weight.format.group});
      launch.programmatic = facts.compute_capability >= 90;
    }
    return program;
  }

 private:
  ExpandStage stage_;
};

}  // namespace

std::unique_ptr<const Family> expand_family(const ExpandStage& stage, const char* name) {
  return std::make_unique<Expand>(stage, name);
}

}  // namespace fftune
