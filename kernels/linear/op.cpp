#include "kernels/linear/linear.hpp"

#include <cmath>
#include <string>
#include <utility>

#include "kernels/common/op_parts.hpp"

namespace fftune::linear {
namespace {

/// The sum of dy's rows: an addition for each element.
StageSpec d_bias_spec(const Problem& problem, const std::vector<TensorSpec>& tensors) {
  const std::int64_t m = problem.size("m"), n = problem.size("n");
  StageSpec stage{.name = stage_d_bias,
                  .inputs = {"dy"},
                  .outputs = {"dbias"},
                  .reduction_length = m,
                  .flops = static_cast<double>(m * n)};
  if (form_of(problem).accumulates) stage.inputs.emplace_back("dbias_before");
  for (const auto& names : {stage.inputs, stage.outputs})
    for (const auto& name : names)
      stage.bytes += static_cast<double>(tensors[tensor_index(tensors, name)].bytes());
  return stage;
}

std::vector<OptionField> option_fields() {
  std::vector<OptionField> options{
      rare_option("bias", "whether y has a bias, and the backward pass its gradient",
                  {"no", "yes"}),
      y_scale_option(),
      residual_option(),
      rare_option("output", "element type of y: that of x and w, or f32", {"same", "f32"}, "fwd"),
      batch_invariant_option(),
      accumulate_option("w and bias")};
  for (OptionField& option : packed_options()) options.push_back(std::move(option));
  options.push_back(quantise_option());
  return options;
}

OpFacts facts() {
  return {.name = "linear",
          .summary = "linear layer: y = x w^T (+ bias)",
          .sizes = {product_tokens(),
                    {.name = "k", .help = "input features"},
                    {.name = "n", .help = "output features", .example = 2048}},
          .options = option_fields(),
          .families = {families},
          .baselines = baselines};
}

class Linear final : public DescribedOp {
 public:
  Linear() : DescribedOp(facts()) {}

  std::string contradiction(const Problem& problem) const override {
    if (auto reason = quantise_contradiction(problem); !reason.empty()) return reason;
    return packed_contradiction(problem, "k", problem.size("k"));
  }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const std::int64_t m = problem.size("m"), k = problem.size("k"), n = problem.size("n");
    const auto dtype = problem.dtype;
    // Sums of n products with weights of deviation 1/sqrt(n) keep the deviation of their inputs.
    const double by_k = 1 / std::sqrt(static_cast<double>(k));
    const Form form = form_of(problem);
    std::vector<TensorSpec> tensors;
    if (form.backward) tensors.push_back({"dy", dtype, {m, n}, Role::input, 1});
    tensors.push_back({"x", dtype, {m, k}, Role::input, 1});
    tensors.back().kept = form.backward;
    const auto packed = packed_weights(problem);
    for (const PackedWeight& weight : packed) append(tensors, packed_tensors(weight, by_k));
    if (quantises(problem))
      append(tensors, quantised_weight("w", n, k, quantised_scaling(problem), by_k));
    else if (packed.empty())
      tensors.push_back({"w", dtype, {n, k}, Role::input, by_k});
    if (!form.backward) {
      if (form.bias) tensors.push_back({"bias", dtype, {n}, Role::input, 1});
      if (form.y_scale) tensors.push_back(y_scale_tensor(n));
      if (form.residual) tensors.push_back({"residual", dtype, {m, n}, Role::input, 1});
      tensors.push_back({"y", form.wide ? DType::f32 : dtype, {m, n}, Role::output, 1});
      for (const PackedWeight& weight : packed) tensors.push_back(expanded_tensor(weight));
      if (quantises(problem)) append(tensors, quantised_tensors(quantised_x(problem)));
      return tensors;
    }
    std::vector<TensorSpec> gradients{{"dw", dtype, {n, k}, Role::output, 1}};
    if (form.bias) gradients.push_back({"dbias", dtype, {n}, Role::output, 1});
    for (TensorSpec& gradient : gradients) gradient.sums_tokens = true;
    if (form.accumulates) append(tensors, initial_values(gradients));
    tensors.push_back({"dx", dtype, {m, k}, Role::output, 1});
    append(tensors, std::move(gradients));
    return tensors;
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    const auto tensors = this->tensors(problem);
    std::vector<StageSpec> stages;
    if (const auto packed = packed_weights(problem); !packed.empty())
      stages.push_back(expand_spec(stage_expand, packed, tensors));
    if (quantises(problem))
      stages.push_back(quantise_spec(stage_quantise, quantised_x(problem), tensors));
    for (const GemmStage& stage : gemm_stages(problem))
      stages.push_back(stage_spec(stage.name, stage.gemm(problem), tensors));
    if (form_of(problem).backward && form_of(problem).bias)
      stages.push_back(d_bias_spec(problem, tensors));
    return stages;
  }

  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    linear::reference(problem, stages(problem).at(stage).name, tensors, parallel);
  }
};

}  // namespace

Form form_of(const Problem& problem) {
  return {.backward = problem.pass == "bwd",
          .bias = problem.has("bias", "yes"),
          .y_scale = problem.has("y-scale", "yes"),
          .residual = problem.has("residual", "yes"),
          .wide = problem.has("output", "f32"),
          .accumulates = problem.has("accumulate", "yes")};
}

}  // namespace fftune::linear

const fftune::Op& fftune::linear_op() {
  static const linear::Linear op;
  return op;
}
