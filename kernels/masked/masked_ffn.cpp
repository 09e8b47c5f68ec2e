#include <cmath>

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
  std::vector<std::string> passes() const override { return {"fwd"}; }

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
    return {{"act", "activation of the gate", activation_names()}, mask_option()};
  }
  std::vector<DType> dtypes(DeviceKind kind) const override {
    if (kind == DeviceKind::cpu) return {DType::f32, DType::bf16};
    return {DType::bf16, DType::fp16, DType::f32};
  }
  std::string_view token_size() const override { return "m"; }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const std::int64_t m = problem.size("m"), d = problem.size("d"), h = problem.size("h");
    const DType dtype = problem.dtype;
    // A sum of n products with weights of deviation 1/sqrt(n) keeps the deviation of its inputs.
    const double by_d = 1 / std::sqrt(static_cast<double>(d));
    const double by_h = 1 / std::sqrt(static_cast<double>(h));
    TensorSpec hidden{"hidden", dtype, {m, h}, Role::intermediate, 1};
    hidden.sorted = true;
    return {{"x", dtype, {m, d}, Role::input, 1},
            mask_tensor(problem),
            {"w_gate_true", dtype, {h, d}, Role::input, by_d},
            {"w_up_true", dtype, {h, d}, Role::input, by_d},
            {"w_down_true", dtype, {d, h}, Role::input, by_h},
            {"w_gate_false", dtype, {h, d}, Role::input, by_d},
            {"w_up_false", dtype, {h, d}, Role::input, by_d},
            {"w_down_false", dtype, {d, h}, Role::input, by_h},
            {"y", dtype, {m, d}, Role::output, 1},
            hidden};
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    StageSpec gate_up{
        .name = stage_name(Stage::gate_up),
        .inputs = {"x", "mask", "w_gate_true", "w_up_true", "w_gate_false", "w_up_false"},
        .outputs = {"hidden"}};
    StageSpec down{.name = stage_name(Stage::down),
                   .inputs = {"hidden", "mask", "w_down_true", "w_down_false"},
                   .outputs = {"y"}};
    const auto tensors = this->tensors(problem);
    for (const Stage stage : {Stage::gate_up, Stage::down}) {
      StageSpec& spec = stage == Stage::gate_up ? gate_up : down;
      const GemmShape shape = product_of(stage, problem).shape;
      spec.reduction_length = shape.k;
      // A multiplication and an addition for each weight and token of one expert.
      spec.flops = 2.0 * shape.products * static_cast<double>(shape.m) *
                   static_cast<double>(shape.n) * static_cast<double>(shape.k);
      for (const auto& names : {spec.inputs, spec.outputs})
        for (const auto& name : names)
          spec.bytes += static_cast<double>(tensors[tensor_index(tensors, name)].bytes());
    }
    return {gate_up, down};
  }

  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    masked::reference(stage == 0 ? Stage::gate_up : Stage::down, problem, tensors, parallel);
  }

  std::vector<const Family*> families() const override {
    return {&gate_up_sm90_family(), &down_sm90_family(),        &gate_up_sm80_family(),
            &down_sm80_family(),    &gate_up_fallback_family(), &down_fallback_family(),
            &ffn_cpu_blas_family(), &ffn_cpu_plain_family()};
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
