// masked-linear and masked-ffn.
#include <cmath>
#include <string>
#include <utility>

#include "kernels/common/activation.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/masked/masked.hpp"

namespace fftune::masked {
namespace {

/// Distribution of the masks.
OptionField mask_option() {
  return {.name = "mask",
          .help = "distribution of the masks, for test data and the choice of a preset",
          .choices = {"block:0.33"},
          .pattern = true};
}

TensorSpec mask_tensor(const Problem& problem) {
  TensorSpec mask{"mask", DType::u8, {problem.size("m")}, Role::input};
  mask.pattern = problem.option("mask");
  return mask;
}

/// Common parts of both ops.
class MaskedOp : public DescribedOp {
 public:
  using DescribedOp::DescribedOp;

  std::vector<StageSpec> stages(const Problem& problem) const final {
    const auto tensors = this->tensors(problem);
    std::vector<StageSpec> stages;
    for (const GemmStage& stage : gemm_stages(problem))
      stages.push_back(stage_spec(stage.name, stage.gemm(problem), tensors));
    return stages;
  }

  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const final {
    masked::reference(problem, std::string(gemm_stages(problem).at(stage).name), tensors, parallel);
  }
};

SizeField tokens() {
  return token_count("m", "tokens", {256, 1024, 4096, 16384}, {16, 128, 512});
}

class MaskedLinear final : public MaskedOp {
 public:
  MaskedLinear()
      : MaskedOp(
            {.name = "masked-linear",
             .summary =
                 "linear layer of two experts: y_i = x_i w_true^T where mask_i, else x_i w_false^T",
             .sizes = {tokens(),
                       {.name = "k", .help = "input features"},
                       {.name = "n", .help = "output features"}},
             .options = {mask_option(), accumulate_option("the weights"),
                         frozen_option("the weights")},
             .families = {linear_families},
             .baselines = linear_baselines,
             .contradiction = frozen_contradiction}) {}

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const std::int64_t m = problem.size("m"), k = problem.size("k"), n = problem.size("n");
    const DType dtype = problem.dtype;
    // A sum of n products with weights of deviation 1/sqrt(n) keeps the deviation of its inputs.
    const double by_k = 1 / std::sqrt(static_cast<double>(k));
    if (problem.pass == "bwd") {
      const double by_n = 1 / std::sqrt(static_cast<double>(n));
      const bool frozen = is_frozen(problem);
      std::vector<TensorSpec> tensors{{"dy", dtype, {m, n}, Role::input, 1}};
      if (!frozen) tensors.push_back({"x", dtype, {m, k}, Role::input, 1});
      tensors.push_back(mask_tensor(problem));
      for (std::size_t i = 1; i < tensors.size(); ++i) tensors[i].kept = true;
      for (const char* name : {"w_true", "w_false"})
        tensors.push_back({name, dtype, {n, k}, Role::input, by_n});
      std::vector<TensorSpec> gradients{{"dw_true", dtype, {n, k}, Role::output, 1},
                                        {"dw_false", dtype, {n, k}, Role::output, 1}};
      for (TensorSpec& gradient : gradients) gradient.sums_tokens = true;
      if (accumulates(problem)) append(tensors, initial_values(gradients));
      tensors.push_back({"dx", dtype, {m, k}, Role::output, 1});
      if (!frozen) append(tensors, std::move(gradients));
      return tensors;
    }
    return {{"x", dtype, {m, k}, Role::input, 1},
            mask_tensor(problem),
            {"w_true", dtype, {n, k}, Role::input, by_k},
            {"w_false", dtype, {n, k}, Role::input, by_k},
            {"y", dtype, {m, n}, Role::output, 1}};
  }
};

constexpr const char* expert_suffixes[2] = {"_true", "_false"};

std::vector<TensorSpec> ffn_tensors(const Problem& problem) {
  const std::int64_t m = problem.size("m"), d = problem.size("d"), h = problem.size("h");
  const DType dtype = problem.dtype;
  const bool backward = problem.pass == "bwd", saved = backward && !recomputes(problem),
             frozen = is_frozen(problem);
  std::vector<TensorSpec> tensors;
  const auto sorted = [&](const char* name, Role role) {
    TensorSpec inner{name, dtype, {m, h}, role, 1};
    inner.sorted = is_sorted(name);
    inner.kept = role == Role::input;
    tensors.push_back(inner);
  };
  // gate and up have h x d, down d x h.
  const auto of_each = [&](const std::string& prefix, Role role, double by_d, double by_h) {
    std::vector<TensorSpec> all;
    for (const char* expert : expert_suffixes) {
      for (const char* name : {"gate", "up"})
        all.push_back({prefix + name + expert, dtype, {h, d}, role, by_d});
      all.push_back({prefix + "down" + expert, dtype, {d, h}, role, by_h});
    }
    for (TensorSpec& tensor : all) tensor.sums_tokens = role == Role::output;
    return all;
  };
  if (backward) tensors.push_back({"dy", dtype, {m, d}, Role::input, 1});
  if (!saved || !frozen) tensors.push_back({"x", dtype, {m, d}, Role::input, 1});
  tensors.push_back(mask_tensor(problem));
  for (std::size_t i = 1; i < tensors.size(); ++i) tensors[i].kept = backward;
  if (saved)
    for (const char* name : {"gate", "up"}) sorted(name, Role::input);
  // A sum of n products with weights of deviation 1/sqrt(n) keeps the deviation of its inputs.
  append(tensors, of_each("w_", Role::input, 1 / std::sqrt(static_cast<double>(d)),
                          1 / std::sqrt(static_cast<double>(h))));
  if (accumulates(problem)) append(tensors, initial_values(of_each("dw_", Role::output, 1, 1)));
  if (backward) {
    tensors.push_back({"dx", dtype, {m, d}, Role::output, 1});
    if (!frozen) append(tensors, of_each("dw_", Role::output, 1, 1));
  } else {
    tensors.push_back({"y", dtype, {m, d}, Role::output, 1});
  }
  if (stores_gates(problem))
    for (const char* name : {"gate", "up"})
      sorted(name, backward ? Role::intermediate : Role::output);
  if (!saved || !frozen) sorted("hidden", Role::intermediate);
  if (backward)
    for (const char* name : {"d_gate", "d_up"}) sorted(name, Role::intermediate);
  return tensors;
}

std::vector<OptionField> ffn_options() {
  std::vector<OptionField> options{{"act", "activation of the gate", activation_names()},
                                   mask_option()};
  for (OptionField& field : gated_save_options(", in the order of the mask"))
    options.push_back(std::move(field));
  options.push_back(accumulate_option("the weights"));
  options.push_back(frozen_option("the weights"));
  return options;
}

class MaskedFfn final : public MaskedOp {
 public:
  MaskedFfn()
      : MaskedOp(
            {.name = "masked-ffn",
             .summary =
                 "gated feed-forward network of two experts: ffn with the true one's weights where "
                 "mask_i, else with the false one's",
             .sizes = {tokens(),
                       {.name = "d", .help = "embedding size"},
                       {.name = "h", .help = "intermediate size", .example = 2048}},
             .options = ffn_options(),
             .families = {ffn_families},
             .baselines = ffn_baselines,
             .contradiction = frozen_contradiction}) {}

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return ffn_tensors(problem);
  }
};

}  // namespace

}  // namespace fftune::masked

const fftune::Op& fftune::masked_linear_op() {
  static const masked::MaskedLinear op;
  return op;
}

const fftune::Op& fftune::masked_ffn_op() {
  static const masked::MaskedFfn op;
  return op;
}
