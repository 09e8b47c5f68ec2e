#include "kernels/ffn/ffn.hpp"

#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <utility>

#include "core/error.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/ffn/norm.hpp"

namespace fftune::ffn {
namespace {

std::vector<TensorSpec> forward_tensors(const Problem& problem) {
  const auto [m, d, h] = shape_of(problem);
  const auto dtype = problem.dtype;
  // A sum of n products with weights of deviation 1/sqrt(n) keeps the deviation of its inputs.
  const double by_d = 1 / std::sqrt(static_cast<double>(d));
  const double by_h = 1 / std::sqrt(static_cast<double>(h));
  // Elements of fp8 are drawn well above their subnormals, and below 448; the scales undo that.
  const bool quantised = is_quantised(problem);
  const double up_by = quantised ? 16 : 1, hidden_by = quantised ? 4 : 1;
  const Form form = form_of(problem);
  std::vector<TensorSpec> tensors{{"x", dtype, {m, d}, Role::input, up_by}};
  const auto packed = packed_gate_up(problem), packed_last = packed_down(problem);
  if (!packed.empty()) {
    std::vector<TensorSpec> numbers;
    const auto add = [&](const PackedWeight& weight, double deviation) {
      auto own = packed_tensors(weight, deviation);
      tensors.push_back(std::move(own.front()));
      std::move(own.begin() + 1, own.end(), std::back_inserter(numbers));
    };
    for (const PackedWeight& weight : packed) add(weight, by_d);
    add(packed_last.front(), by_h);
    std::move(numbers.begin(), numbers.end(), std::back_inserter(tensors));
  } else if (quantises(problem)) {
    std::vector<TensorSpec> scales;
    const auto add = [&](const char* name, std::int64_t n, std::int64_t k, double deviation) {
      auto own = quantised_weight(name, n, k, quantised_scaling(problem), deviation);
      tensors.push_back(std::move(own.front()));
      scales.push_back(std::move(own.back()));
    };
    if (form.gated) add("w_gate", h, d, by_d);
    add("w_up", h, d, by_d);
    add("w_down", d, h, by_h);
    std::move(scales.begin(), scales.end(), std::back_inserter(tensors));
  } else if (form.gated)
    tensors.push_back({"w_gate", dtype, {h, d}, Role::input, quantised ? up_by : by_d});
  if (packed.empty() && !quantises(problem)) {
    tensors.push_back({"w_up", dtype, {h, d}, Role::input, quantised ? up_by : by_d});
    tensors.push_back({"w_down", dtype, {d, h}, Role::input, quantised ? up_by : by_h});
  }
  const bool in_blocks = has_block_scales(problem);
  const auto blocks = [&](std::int64_t extent) { return ceil_div(extent, scale_block); };
  const auto add_scale = [&](const char* name, std::vector<std::int64_t> shape, double mean) {
    tensors.push_back({name, DType::f32,
                       in_blocks ? std::move(shape) : std::vector<std::int64_t>{1}, Role::input,
                       mean / 10, mean});
  };
  if (quantised) {
    add_scale("x_scale", {m, blocks(d)}, 1 / up_by);
    add_scale("w_gate_scale", {blocks(h), blocks(d)}, by_d / up_by);
    add_scale("w_up_scale", {blocks(h), blocks(d)}, by_d / up_by);
    if (!in_blocks) add_scale("hidden_scale", {}, 1 / hidden_by);
    add_scale("w_down_scale", {blocks(d), blocks(h)}, by_h / up_by);
  }
  const DType wide = wide_dtype(problem);
  if (form.bias_up) tensors.push_back({"b_up", wide, {h}, Role::input, 1});
  if (form.bias) tensors.push_back({"b_down", wide, {d}, Role::input, 1});
  if (form.y_scale) tensors.push_back(y_scale_tensor(d));
  if (form.residual) tensors.push_back({"residual", wide, {m, d}, Role::input, 1});
  // The last stage may add the sum that the first one writes.
  if (form.residual && form.adds_before) tensors.back().may_alias = "sum";
  const auto append_norm_tensors = [&](Role role) { append(tensors, norm_tensors(problem, role)); };
  append_norm_tensors(Role::input);
  tensors.push_back({"y", wide, {m, d}, Role::output, 1});
  if (form.saves) {
    tensors.push_back({"gate", wide, {m, h}, Role::output, 1});
    tensors.push_back({"up", wide, {m, h}, Role::output, 1});
  }
  append_norm_tensors(Role::output);
  append_norm_tensors(Role::intermediate);
  for (const auto& weights : {packed, packed_last})
    for (const PackedWeight& weight : weights) tensors.push_back(expanded_tensor(weight));
  if (quantises(problem)) {
    const auto add = [&](const QuantisedRows& rows) { append(tensors, quantised_tensors(rows)); };
    add(quantised_x(problem));
    if (has_hidden_stage(problem))
      tensors.push_back({"hidden", dtype, {m, h}, Role::intermediate, 1});
    add(quantised_hidden(problem));
    return tensors;
  }
  tensors.push_back({"hidden", dtype, {m, h}, Role::intermediate, 1});
  if (in_blocks)
    tensors.push_back({"hidden_scale", DType::f32, {m, blocks(h)}, Role::intermediate, 1});
  return tensors;
}

std::vector<TensorSpec> backward_tensors(const Problem& problem) {
  const auto [m, d, h] = shape_of(problem);
  const auto dtype = problem.dtype;
  const double by_d = 1 / std::sqrt(static_cast<double>(d));
  const double by_h = 1 / std::sqrt(static_cast<double>(h));
  const bool again = recomputes(problem), frozen = is_frozen(problem);
  const auto inner = [&, m = m, h = h](const char* name, Role role) {
    return TensorSpec{name, dtype, {m, h}, role, 1};
  };
  std::vector<TensorSpec> tensors{{"dy", dtype, {m, d}, Role::input, 1}};
  if (again || !frozen) tensors.push_back({"x", dtype, {m, d}, Role::input, 1});
  if (!again)
    for (const char* name : {"gate", "up"}) tensors.push_back(inner(name, Role::input));
  for (std::size_t i = 1; i < tensors.size(); ++i) tensors[i].kept = true;
  tensors.push_back({"w_gate", dtype, {h, d}, Role::input, by_d});
  tensors.push_back({"w_up", dtype, {h, d}, Role::input, by_d});
  tensors.push_back({"w_down", dtype, {d, h}, Role::input, by_h});
  std::vector<TensorSpec> gradients{{"dw_gate", dtype, {h, d}, Role::output, 1},
                                    {"dw_up", dtype, {h, d}, Role::output, 1},
                                    {"dw_down", dtype, {d, h}, Role::output, 1}};
  for (TensorSpec& gradient : gradients) gradient.sums_tokens = true;
  if (form_of(problem).accumulates) append(tensors, initial_values(gradients));
  tensors.push_back({"dx", dtype, {m, d}, Role::output, 1});
  if (!frozen) append(tensors, std::move(gradients));
  if (again)
    for (const char* name : {"gate", "up"}) tensors.push_back(inner(name, Role::intermediate));
  if (again || !frozen) tensors.push_back(inner("hidden", Role::intermediate));
  for (const char* name : {"d_gate", "d_up"}) tensors.push_back(inner(name, Role::intermediate));
  return tensors;
}

std::vector<OptionField> option_fields() {
  std::vector<OptionField> options{{"act", "activation of the gate", activation_names()}};
  append(options, gated_save_options());
  append(
      options,
      {rare_option(
           "bias",
           "biases of every row: down adds b_down to y; both also adds b_up to the activation's "
           "input (gate=no)",
           {"none", "down", "both"}, "fwd"),
       y_scale_option(), residual_option(),
       rare_option("gate",
                   "whether the activation's result gates another product, or is hidden itself",
                   {"yes", "no"}, "fwd"),
       rare_option("scales",
                   "granularity of fp8 scales: a whole tensor, or blocks of 128 elements (in a "
                   "weight 128 x 128)",
                   {"tensor", "block"}, "fwd"),
       batch_invariant_option(), accumulate_option("the weights"), frozen_option("the weights")});
  append(options, norm_options());
  append(options, packed_options());
  options.push_back(quantise_option());
  return options;
}

OpFacts facts() {
  return {.name = "ffn",
          .summary = "gated feed-forward network: y = (act(x w_gate^T) * (x w_up^T)) w_down^T",
          .sizes = {product_tokens(),
                    {.name = "d", .help = "embedding size"},
                    {.name = "h", .help = "intermediate size", .example = 2048}},
          .options = option_fields(),
          .families = {forward_families, norm_families, backward_families}};
}

class Ffn final : public DescribedOp {
 public:
  Ffn() : DescribedOp(facts()) {}

  std::vector<DType> dtypes(DeviceKind kind) const override {
    if (kind == DeviceKind::cpu) return {DType::f32, DType::bf16, DType::fp8};
    return {DType::bf16, DType::fp16, DType::f32, DType::fp8};
  }
  std::vector<DType> dtypes_of_pass(DeviceKind kind, std::string_view pass) const override {
    auto all = dtypes(kind);
    if (pass == "bwd") std::erase(all, DType::fp8);
    return all;
  }
  std::string contradiction(const Problem& problem) const override {
    if (problem.has("scales", "block") && !is_quantised(problem))
      return fmt::format("scales=block is for dtype fp8, not {}", dtype_name(problem.dtype));
    const Form form = form_of(problem);
    if (form.bias_up && form.gated)
      return "bias=both is of a network without a gate: give gate=no too, or bias=down";
    if (!form.gated && form.saves) return "save=preact is of a gate: gate=no has no backward pass";
    if (!form.gated && is_quantised(problem)) return "gate=no is for bf16, fp16 and f32, not fp8";
    for (const auto& reason : {norm_contradiction(problem), frozen_contradiction(problem),
                               quantise_contradiction(problem)})
      if (!reason.empty()) return reason;
    if (packed_format(problem).packed) {
      const std::string_view code = code_name(packed_format(problem).code);
      if (is_quantised(problem))
        return fmt::format("weights={} is for x of bf16, fp16 and f32, not fp8", code);
    }
    for (const char* name : {"d", "h"})
      if (auto reason = packed_contradiction(problem, name, problem.size(name)); !reason.empty())
        return reason;
    return "";
  }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return problem.pass == "bwd" ? backward_tensors(problem) : forward_tensors(problem);
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    const auto tensors = this->tensors(problem);
    std::vector<StageSpec> stages;
    if (form_of(problem).normalises) stages.push_back(norm_stage(problem));
    const bool packed = problem.pass == "fwd" && packed_format(problem).packed;
    for (const GemmStage& stage : gemm_stages(problem)) {
      if (packed && (stage.name == stage_gate_up || stage.name == stage_up))
        stages.push_back(expand_spec(stage_expand_gate_up, packed_gate_up(problem), tensors));
      if (quantises(problem) && (stage.name == stage_gate_up || stage.name == stage_up))
        stages.push_back(quantise_spec(stage_quantise, quantised_x(problem), tensors));
      if (has_hidden_stage(problem) && stage.name == stage_down)
        stages.push_back(quantise_spec(stage_quantise_hidden, quantised_hidden(problem), tensors));
      if (packed && stage.name == stage_down)
        stages.push_back(expand_spec(stage_expand_down, packed_down(problem), tensors));
      stages.push_back(stage_spec(stage.name, stage.gemm(problem), tensors));
    }
    return stages;
  }

  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    ffn::reference(problem, stages(problem).at(stage).name, tensors, parallel);
  }

  std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) const override {
    if (!form_of(problem).gated || form_of(problem).y_scale || packed_format(problem).packed ||
        quantises(problem))
      return {};
    return ffn::baselines(problem, facts);
  }
};

}  // namespace

Shape shape_of(const Problem& problem) {
  return {problem.size("m"), problem.size("d"), problem.size("h")};
}

bool is_quantised(const Problem& problem) {
  return problem.dtype == DType::fp8;
}

bool has_block_scales(const Problem& problem) {
  return is_quantised(problem) && problem.has("scales", "block");
}

DType wide_dtype(const Problem& problem) {
  return is_quantised(problem) ? DType::bf16 : problem.dtype;
}

bool stores_hidden(const Problem& problem) {
  return !recomputes(problem) && !is_frozen(problem);
}

Form form_of(const Problem& problem) {
  // The forward pass saves the tensors that the backward pass would otherwise compute again.
  return {.gated = !problem.has("gate", "no"),
          .bias_up = problem.has("bias", "both"),
          .saves = problem.has("save", problem.pass == "bwd" ? "input" : "preact"),
          .bias = problem.has("bias", "down") || problem.has("bias", "both"),
          .y_scale = problem.has("y-scale", "yes"),
          .residual = problem.has("residual", "yes"),
          .accumulates = problem.has("accumulate", "yes"),
          .normalises = problem.has("norm", "rms") || problem.has("norm", "add-rms"),
          .adds_before = problem.has("norm", "add-rms")};
}

}  // namespace fftune::ffn

const fftune::Op& fftune::ffn_op() {
  static const ffn::Ffn op;
  return op;
}
