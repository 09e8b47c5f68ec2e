#include <cmath>

#include "kernels/masked/baselines.hpp"
#include "kernels/masked/families.hpp"
#include "kernels/masked/masked.hpp"

namespace fftune {
namespace masked {
namespace {

class MaskedLinear final : public Op {
 public:
  std::string_view name() const override { return "masked-linear"; }
  std::string_view summary() const override {
    return "linear layer of two experts: y_i = x_i w_true^T where mask_i, else x_i w_false^T";
  }
  std::vector<std::string> passes() const override { return {"fwd", "bwd"}; }

  std::vector<SizeField> sizes() const override {
    return {{.name = "m",
             .help = "tokens",
             .default_on_cuda = {256, 1024, 4096, 16384},
             .default_on_cpu = {16, 128, 512}},
            {.name = "k", .help = "input features", .default_on_cuda = {}, .default_on_cpu = {}},
            {.name = "n", .help = "output features", .default_on_cuda = {}, .default_on_cpu = {}}};
  }
  std::vector<OptionField> options() const override { return {mask_option(), accumulate_option()}; }
  std::vector<DType> dtypes(DeviceKind kind) const override {
    if (kind == DeviceKind::cpu) return {DType::f32, DType::bf16};
    return {DType::bf16, DType::fp16, DType::f32};
  }
  std::string_view token_size() const override { return "m"; }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const std::int64_t m = problem.size("m"), k = problem.size("k"), n = problem.size("n");
    const DType dtype = problem.dtype;
    // A sum of n products with weights of deviation 1/sqrt(n) keeps the deviation of its inputs.
    const double by_k = 1 / std::sqrt(static_cast<double>(k));
    if (problem.pass == "bwd") {
      // Sums over the tokens of one expert, which may be all.
      const double by_m = 1 / std::sqrt(static_cast<double>(m));
      const double by_n = 1 / std::sqrt(static_cast<double>(n));
      TensorSpec x{"x", dtype, {m, k}, Role::input, by_m}, mask = mask_tensor(problem);
      x.kept = mask.kept = true;
      std::vector<TensorSpec> tensors{{"dy", dtype, {m, n}, Role::input, 1},
                                      x,
                                      mask,
                                      {"w_true", dtype, {n, k}, Role::input, by_n},
                                      {"w_false", dtype, {n, k}, Role::input, by_n}};
      if (accumulates(problem))
        for (const char* name : {"dw_true_before", "dw_false_before"})
          tensors.push_back({name, dtype, {n, k}, Role::input, 1});
      tensors.push_back({"dx", dtype, {m, k}, Role::output, 1});
      for (const char* name : {"dw_true", "dw_false"})
        tensors.push_back({name, dtype, {n, k}, Role::output, 1});
      return tensors;
    }
    return {{"x", dtype, {m, k}, Role::input, 1},
            mask_tensor(problem),
            {"w_true", dtype, {n, k}, Role::input, by_k},
            {"w_false", dtype, {n, k}, Role::input, by_k},
            {"y", dtype, {m, n}, Role::output, 1}};
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    const std::int64_t m = problem.size("m"), k = problem.size("k"), n = problem.size("n");
    std::vector<StageSpec> stages;
    if (problem.pass == "fwd")
      stages = {{.name = stage_name(Stage::linear),
                 .inputs = {"x", "mask", "w_true", "w_false"},
                 .outputs = {"y"},
                 .reduction_length = k}};
    else
      stages = {{.name = stage_name(Stage::dx),
                 .inputs = {"dy", "mask", "w_true", "w_false"},
                 .outputs = {"dx"},
                 .reduction_length = n},
                {.name = stage_name(Stage::dw),
                 .inputs = {"dy", "x", "mask"},
                 .outputs = {"dw_true", "dw_false"},
                 .reduction_length = m}};
    if (accumulates(problem))
      stages.back().inputs.insert(stages.back().inputs.end(),
                                  {"dw_true_before", "dw_false_before"});
    const auto tensors = this->tensors(problem);
    for (StageSpec& stage : stages) {
      stage.flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
      for (const auto& names : {stage.inputs, stage.outputs})
        for (const auto& name : names)
          stage.bytes += static_cast<double>(tensors[tensor_index(tensors, name)].bytes());
    }
    return stages;
  }

  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    if (problem.pass == "fwd") return masked::reference(Stage::linear, problem, tensors, parallel);
    masked::reference(stage == 0 ? Stage::dx : Stage::dw, problem, tensors, parallel);
  }

  std::vector<const Family*> families() const override {
    return {&linear_sm90_family(), &dx_sm90_family(),         &dw_sm90_family(),
            &linear_sm80_family(), &linear_fallback_family(), &dx_fallback_family(),
            &dw_fallback_family(), &linear_cpu_blas_family(), &linear_cpu_plain_family(),
            &cpu_backward_family()};
  }
  std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) const override {
    return linear_baselines(problem, facts);
  }
};

}  // namespace
}  // namespace masked

const Op& masked_linear_op() {
  static const masked::MaskedLinear op;
  return op;
}

}  // namespace fftune
