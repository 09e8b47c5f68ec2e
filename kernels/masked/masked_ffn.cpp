#include "kernels/common/activation.hpp"
#include "kernels/masked/baselines.hpp"
#include "kernels/masked/families.hpp"
#include "kernels/masked/masked.hpp"

namespace fftune {
namespace masked {
namespace {

class MaskedFfn final : public Op {
 public:
  std::string_view name() const override { return "masked-ffn"; }
  std::string_view summary() const override {
    return "gated feed-forward network of two experts: ffn with the true one's weights where "
           "mask_i, else with the false one's";
  }
  std::vector<std::string> passes() const override { return {"fwd", "bwd"}; }

  std::vector<SizeField> sizes() const override {
    return {{.name = "m",
             .help = "tokens",
             .default_on_cuda = {256, 1024, 4096, 16384},
             .default_on_cpu = {16, 128, 512}},
            {.name = "d", .help = "embedding size", .default_on_cuda = {}, .default_on_cpu = {}},
            {.name = "h",
             .help = "intermediate size",
             .default_on_cuda = {},
             .default_on_cpu = {},
             .example = 2048}};
  }
  std::vector<OptionField> options() const override {
    return {{"act", "activation of the gate", activation_names()},
            mask_option(),
            {.name = "save",
             .help = "what is written for a backward pass: gate and up before the activation, in "
                     "the order of the mask",
             .choices = {"none", "preact"},
             .rare = true,
             .pass = "fwd"},
            {.name = "save",
             .help = "what the forward pass kept: gate and up before the activation, in the order "
                     "of the mask, or its input alone, from which they are computed again",
             .choices = {"preact", "input"},
             .rare = true,
             .pass = "bwd"},
            accumulate_option()};
  }
  std::vector<DType> dtypes(DeviceKind kind) const override {
    if (kind == DeviceKind::cpu) return {DType::f32, DType::bf16};
    return {DType::bf16, DType::fp16, DType::f32};
  }
  std::string_view token_size() const override { return "m"; }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return ffn_tensors(problem);
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    const auto tensors = ffn_tensors(problem);
    std::vector<StageSpec> stages;
    for (const Stage stage : stages_of(problem))
      stages.push_back(stage_spec(stage, problem, tensors));
    return stages;
  }

  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    masked::reference(stages_of(problem).at(stage), problem, tensors, parallel);
  }

  std::vector<const Family*> families() const override {
    std::vector<const Family*> all;
    for (const auto& some :
         {ffn_sm90_families(), ffn_sm90_sum_families(), ffn_sm80_families(),
          ffn_sm80_sum_families(), ffn_fallback_families(), ffn_cpu_blas_families(),
          ffn_cpu_blas_sum_families(), ffn_cpu_plain_families()})
      all.insert(all.end(), some.begin(), some.end());
    return all;
  }
  std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) const override {
    return ffn_baselines(problem, facts);
  }
};

}  // namespace
}  // namespace masked

const Op& masked_ffn_op() {
  static const masked::MaskedFfn op;
  return op;
}

}  // namespace fftune
