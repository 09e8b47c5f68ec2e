// moe-ffn: its fields, tensors and stages.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common/activation.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/packed/known_model.hpp"
#include "kernels/moe/moe.hpp"
#include "kernels/moe_route/moe_route.hpp"
#include "registry/last_problems.hpp"

namespace fftune::moe {
namespace {

using Numbers = std::vector<std::int32_t>;

/// The first expert of the slice in test data: with some of other ranks on both sides.
std::int32_t drawn_first(const Shape& shape) {
  return static_cast<std::int32_t>((shape.of_all - shape.experts + 1) / 2);
}

/// Fills an integer tensor with a part of the routing that a seed stands for: ids and what follows
/// from them agree where their seeds do.
TensorSpec routed(const Problem& problem, std::string name, std::vector<std::int64_t> shape,
                  Role role, std::function<Numbers(const Numbers& ids)> part) {
  TensorSpec spec{std::move(name), DType::i32, std::move(shape), role};
  const bool is_own = name != "ids";  // of the experts in the weights
  spec.draw = [shape = shape_of(problem), routing = routing_of(problem), part = std::move(part),
               is_own](std::uint64_t seed, std::span<double> values) {
    Numbers ids = draw_routing(routing, shape.m, shape.of_all, shape.top_k, seed);
    if (is_own)
      for (std::int32_t& id : ids) id = own_id(shape, id, drawn_first(shape));
    const Numbers numbers = part(ids);
    std::copy_n(numbers.begin(), values.size(), values.begin());
  };
  return spec;
}

/// ids; and with own-experts first_expert.
void add_ids(const Problem& problem, std::vector<TensorSpec>& tensors) {
  const Shape shape = shape_of(problem);
  tensors.push_back(routed(problem, "ids", {shape.m, shape.top_k}, Role::input,
                           [](const Numbers& ids) { return ids; }));
  if (!has_own_experts(problem)) return;
  tensors.push_back({"first_expert", DType::i32, {1}, Role::input});
  tensors.back().draw = [shape](std::uint64_t, std::span<double> values) {
    values[0] = drawn_first(shape);
  };
}

TensorSpec weights_tensor(const Problem& problem) {
  const Shape shape = shape_of(problem);
  const double mean = 1 / static_cast<double>(shape.top_k);
  return {"weights", DType::f32, {shape.m, shape.top_k}, Role::input, mean / 4, mean};
}

/// Results of the stages own_ids and route.
void add_route(const Problem& problem, std::vector<TensorSpec>& tensors) {
  const Shape shape = shape_of(problem);
  if (has_own_experts(problem))
    tensors.push_back(routed(problem, "own_ids", {shape.m, shape.top_k}, Role::intermediate,
                             [](const Numbers& ids) { return ids; }));
  const auto sorted = [shape](Numbers SortedRouting::*part) {
    return [shape, part](const Numbers& ids) {
      return sorted_routing(all_choices(shape, ids), shape.all_experts(), shape.choices()).*part;
    };
  };
  tensors.push_back(routed(problem, "offsets", {shape.all_experts() + 1}, Role::intermediate,
                           sorted(&SortedRouting::offsets)));
  tensors.push_back(routed(problem, "tokens", {shape.rows()}, Role::intermediate,
                           sorted(&SortedRouting::tokens)));
  tensors.push_back(routed(problem, "places", {shape.m, shape.choices()}, Role::intermediate,
                           sorted(&SortedRouting::places)));
  if (has_row_weights(problem)) {
    const TensorSpec weights = weights_tensor(problem);
    tensors.push_back({"row_weights",
                       DType::f32,
                       {shape.rows()},
                       Role::intermediate,
                       weights.scale,
                       weights.mean});
  }
}

// Elements of fp8 are drawn well above their subnormals, and below 448; the scales undo that.
constexpr double elements_by = 16, hidden_by = 4;

/// The experts that a token chooses at all, of all of them.
double share_of_experts(const Problem& problem) {
  const Shape shape = shape_of(problem);
  double chosen = 0;
  for (const ExpertsAlike& alike : expected_rows(problem))
    chosen += alike.experts * (1 - std::exp(-alike.tokens));
  return chosen / static_cast<double>(shape.all_experts());
}

/// Codes of all weights, then what belongs to each.
void add_packed_weights(const Problem& problem, double by_d, double by_h,
                        std::vector<TensorSpec>& tensors) {
  std::vector<TensorSpec> others;
  const auto add = [&](const std::vector<PackedWeight>& weights, double deviation) {
    for (const PackedWeight& weight : weights) {
      auto own = packed_tensors(weight, deviation);
      for (TensorSpec& tensor : own) tensor.read_share = share_of_experts(problem);
      tensors.push_back(std::move(own.front()));
      std::move(own.begin() + 1, own.end(), std::back_inserter(others));
    }
  };
  add(packed_gate_up(problem), by_d);
  add(packed_down(problem), by_h);
  std::move(others.begin(), others.end(), std::back_inserter(tensors));
}

/// The experts' weights or gradients, each of all experts in one tensor.
void add_weights(const Problem& problem, const std::string& prefix, Role role,
                 std::vector<TensorSpec>& tensors) {
  const Shape shape = shape_of(problem);
  // A sum of n products with weights of deviation 1/sqrt(n) keeps the deviation of its inputs.
  const bool are_sums = role == Role::output;
  double by_d = are_sums ? 1 : 1 / std::sqrt(static_cast<double>(shape.d));
  double by_h = are_sums ? 1 : 1 / std::sqrt(static_cast<double>(shape.h));
  if (!packed_gate_up(problem).empty()) return add_packed_weights(problem, by_d, by_h, tensors);
  if (scales_of(problem) != Scales::none) by_d = by_h = elements_by;
  const std::size_t first = tensors.size();
  const std::int64_t experts = shape.all_experts();
  const DType dtype = element_dtype(problem);
  if (packing_of(problem) == Packing::separate)
    for (const char* name : {"gate", "up"})
      tensors.push_back({prefix + name, dtype, {experts, shape.h, shape.d}, role, by_d});
  else
    tensors.push_back({prefix + "gate_up", dtype, {experts, 2 * shape.h, shape.d}, role, by_d});
  tensors.push_back({prefix + "down", dtype, {experts, shape.d, shape.h}, role, by_h});
  for (std::size_t i = first; i < tensors.size(); ++i) {
    if (!are_sums) tensors[i].read_share = share_of_experts(problem);
    tensors[i].read_in_parts = !are_sums;
    // Experts differ in their rows and in the rows' weights.
    if (are_sums) tensors[i].alike = tensors[i].elements() / experts;
  }
}

/// Scales of fp8, which undo the factor by which elements are drawn larger.
void add_scales(const Problem& problem, std::vector<TensorSpec>& tensors) {
  const Scales kind = scales_of(problem);
  if (kind == Scales::none) return;
  const Shape shape = shape_of(problem);
  const std::int64_t experts = shape.all_experts();
  const auto blocks = [](std::int64_t extent) { return ceil_div(extent, scale_block); };
  const auto add = [&](const char* name, std::vector<std::int64_t> dims, double mean) {
    tensors.push_back({name, DType::f32, std::move(dims), Role::input, mean / 10, mean});
  };
  const auto add_weight = [&](const char* name, std::int64_t n, std::int64_t k, int matrices) {
    const double mean = 1 / std::sqrt(static_cast<double>(k)) / elements_by;
    if (kind == Scales::tensor)
      add(name,
          matrices == 1 ? std::vector<std::int64_t>{experts}
                        : std::vector<std::int64_t>{experts, matrices},
          mean);
    else if (kind == Scales::token)
      add(name, {experts, matrices * n}, mean);
    else
      add(name, {experts, matrices * blocks(n), blocks(k)}, mean);
    tensors.back().read_share = share_of_experts(problem);
  };
  if (kind == Scales::tensor)
    add("x_scale", {1}, 1 / elements_by);
  else if (!quantises(problem))
    add("x_scale", {shape.m, kind == Scales::token ? 1 : blocks(shape.d)}, 1 / elements_by);
  if (packing_of(problem) == Packing::separate) {
    add_weight("w_gate_scale", shape.h, shape.d, 1);
    add_weight("w_up_scale", shape.h, shape.d, 1);
  } else {
    add_weight("w_gate_up_scale", shape.h, shape.d, 2);
  }
  if (kind == Scales::tensor) add("hidden_scale", {1}, 1 / hidden_by);
  add_weight("w_down_scale", shape.d, shape.h, 1);
}

/// The experts' biases or their gradients, of gate and up, of down, or of both.
struct Biases {
  std::string prefix = "b_";
  Role role = Role::input;
  bool gate_up = true, down = true;
};
void add_biases(const Problem& problem, const Biases& biases, std::vector<TensorSpec>& tensors) {
  if (!has_bias(problem)) return;
  const Shape shape = shape_of(problem);
  const auto add = [&](bool is_there, const char* name, std::int64_t width) {
    if (!is_there) return;
    tensors.push_back(
        {biases.prefix + name, wide_dtype(problem), {shape.all_experts(), width}, biases.role, 1});
    if (biases.role == Role::output)
      tensors.back().alike = width;
    else
      tensors.back().read_share = share_of_experts(problem);
  };
  const bool separate = packing_of(problem) == Packing::separate;
  add(biases.gate_up && separate, "gate", shape.h);
  add(biases.gate_up && separate, "up", shape.h);
  add(biases.gate_up && !separate, "gate_up", 2 * shape.h);
  add(biases.down, "down", shape.d);
}

/// Rows in the sorted order: those behind the last offset are of no expert.
TensorSpec sorted_rows(const Problem& problem, std::string_view name, DType dtype,
                       std::int64_t width, Role role) {
  TensorSpec tensor{std::string(name), dtype, {shape_of(problem).rows(), width}, role, 1};
  if (role != Role::input) tensor.live_rows = "offsets";
  return tensor;
}

std::vector<TensorSpec> forward_tensors(const Problem& problem) {
  const Shape shape = shape_of(problem);
  const DType dtype = problem.dtype;
  const DType wide = wide_dtype(problem);
  const Scales scales = scales_of(problem);
  const double x_by = dtype == DType::fp8 ? elements_by : 1;
  std::vector<TensorSpec> tensors{{"x", dtype, {shape.m, shape.d}, Role::input, x_by}};
  add_ids(problem, tensors);
  tensors.push_back(weights_tensor(problem));
  add_weights(problem, "w_", Role::input, tensors);
  add_scales(problem, tensors);
  add_biases(problem, {}, tensors);
  if (has_residual(problem))
    tensors.push_back({"residual", wide, {shape.m, shape.d}, Role::input, 1});
  tensors.push_back({"y", wide, {shape.m, shape.d}, Role::output, 1});
  if (stores_gates(problem))
    for (const char* name : {"gate", "up"})
      tensors.push_back(sorted_rows(problem, name, wide, shape.h, Role::output));
  add_route(problem, tensors);
  const auto add = [&](const char* name, DType type, std::int64_t width) {
    tensors.push_back(sorted_rows(problem, name, type, width, Role::intermediate));
  };
  if (quantises(problem)) append(tensors, quantised_tensors(ffn::quantised_x(problem)));
  add("hidden", element_dtype(problem), shape.h);
  if (scales == Scales::token || scales == Scales::block)
    add("hidden_scale", DType::f32, ceil_div(shape.h, scale_block));
  add("expert_out", wide, shape.d);
  for (const auto& weights : {packed_gate_up(problem), packed_down(problem)})
    for (const PackedWeight& weight : weights) tensors.push_back(expanded_tensor(weight));
  return tensors;
}

std::vector<TensorSpec> backward_tensors(const Problem& problem) {
  const Shape shape = shape_of(problem);
  const DType dtype = problem.dtype;
  const bool again = recomputes(problem);
  const auto inner = [&](std::string_view name, Role role) {
    return sorted_rows(problem, name, dtype, shape.h, role);
  };
  const bool before = weighs_before(problem), frozen = is_frozen(problem);
  std::vector<TensorSpec> tensors{{"dy", dtype, {shape.m, shape.d}, Role::input, 1}};
  if (!frozen || again || before)
    tensors.push_back({"x", dtype, {shape.m, shape.d}, Role::input, 1});
  add_ids(problem, tensors);
  tensors.push_back(weights_tensor(problem));
  if (!again)
    for (const char* name : {"gate", "up"}) tensors.push_back(inner(name, Role::input));
  for (std::size_t i = 1; i < tensors.size(); ++i) tensors[i].kept = true;
  add_weights(problem, "w_", Role::input, tensors);
  add_biases(problem, {.gate_up = again, .down = reads_down_bias(problem)}, tensors);
  std::vector<TensorSpec> gradients;
  add_weights(problem, "dw_", Role::output, gradients);
  add_biases(problem, {.prefix = "db_", .role = Role::output}, gradients);
  if (accumulates(problem)) append(tensors, initial_values(gradients));
  tensors.push_back({"dx", dtype, {shape.m, shape.d}, Role::output, 1});
  tensors.push_back({"d_weights", DType::f32, {shape.m, shape.top_k}, Role::output, 1});
  if (!frozen) append(tensors, std::move(gradients));
  add_route(problem, tensors);
  if (again)
    for (const char* name : {"gate", "up"}) tensors.push_back(inner(name, Role::intermediate));
  tensors.push_back(inner("d_hidden", Role::intermediate));
  const auto add_gradients = [&](bool weighted) {
    for (const std::string_view name : gate_gradients(problem, weighted)) {
      tensors.push_back(inner(name, Role::intermediate));
      if (packing_of(problem) != Packing::separate) tensors.back().shape[1] *= 2;
    }
  };
  add_gradients(true);
  if (before) add_gradients(false);
  if (again || before) tensors.push_back(inner("hidden", Role::intermediate));
  if (!before) tensors.push_back(inner("weighted_hidden", Role::intermediate));
  tensors.push_back(sorted_rows(problem, "dx_rows", dtype, shape.d, Role::intermediate));
  return tensors;
}

/// A stage that is not a GEMM.
StageSpec plain_stage(const Problem& problem, const std::string& name,
                      const std::vector<TensorSpec>& tensors) {
  StageSpec stage;
  stage.name = name;
  const bool before = weighs_before(problem);
  const auto add = [](std::vector<std::string>& to, const std::vector<std::string_view>& names) {
    to.insert(to.end(), names.begin(), names.end());
  };
  if (name == stage_own_ids) {
    stage.inputs = {"ids", "first_expert"};
    stage.outputs = {"own_ids"};
  } else if (name == stage_route) {
    stage.inputs = {own_ids_of(problem)};
    stage.outputs = {"offsets", "tokens", "places"};
    if (has_row_weights(problem)) {
      stage.inputs.emplace_back("weights");
      stage.outputs.emplace_back("row_weights");
    }
  } else if (name == stage_combine) {
    stage.inputs = {"expert_out", own_ids_of(problem), "places"};
    if (!before) stage.inputs.emplace_back("weights");
    if (has_residual(problem)) stage.inputs.emplace_back("residual");
    stage.outputs = {"y"};
  } else if (name == stage_combine_dx) {
    stage.inputs = {"dx_rows", "places"};
    stage.outputs = {"dx"};
    if (before) {
      add(stage.inputs, {"weights", "x"});
      stage.outputs.emplace_back("d_weights");
    }
  } else if (name == stage_d_biases) {
    stage.inputs = {"offsets", "tokens"};
    if (!before) stage.inputs.emplace_back("row_weights");
    for (const BiasGradient& gradient : bias_gradients(problem)) {
      stage.inputs.emplace_back(gradient.rows);
      stage.outputs.emplace_back(gradient.bias);
      if (accumulates(problem)) stage.inputs.push_back(initial_name(gradient.bias));
    }
  } else {
    stage.inputs = {"d_hidden", "gate", "up", "weights", "places"};
    add(stage.outputs, gate_gradients(problem, true));
    if (before) {
      add(stage.outputs, gate_gradients(problem, false));
      if (!recomputes(problem)) stage.outputs.emplace_back("hidden");
    } else {
      add(stage.outputs, {"weighted_hidden", "d_weights"});
    }
    if (reads_down_bias(problem)) add(stage.inputs, {own_ids_of(problem), "dy", "b_down"});
  }
  for (const auto* names : {&stage.inputs, &stage.outputs})
    for (const std::string& tensor : *names) {
      const TensorSpec& spec = tensors[tensor_index(tensors, tensor)];
      stage.bytes += static_cast<double>(spec.bytes());
      if (names == &stage.inputs && !is_integer(spec.dtype))
        stage.flops += 2 * static_cast<double>(spec.elements());
    }
  const Shape shape = shape_of(problem);
  if (name == stage_combine || name == stage_combine_dx)
    stage.reduction_length = before && name == stage_combine_dx ? shape.d : shape.choices();
  if (name == stage_d_biases) stage.reduction_length = shape.m;
  if (name == stage_weigh)
    stage.reduction_length = shape.h + (reads_down_bias(problem) ? shape.d : 0);
  return stage;
}

std::vector<OptionField> option_fields() {
  std::vector<OptionField> options{
      {.name = "act",
       .help = "activation of the gate; swiglu-oai limits gate and up and adds 1 to up",
       .choices = gated_activation_names()},
      {.name = "routing",
       .help = "distribution of the chosen experts, for test data and the choice of a preset",
       .choices = {"uniform"},
       .routing = true}};
  for (OptionField& field : gated_save_options(", in the order of the experts"))
    options.push_back(std::move(field));
  options.push_back(
      rare_option("weigh",
                  "factor of the weights of a token's choices: its experts' outputs, or "
                  "its row before them",
                  {"after", "before"}));
  options.push_back(rare_option("gate-up",
                                "the experts' weights of gate and up: separate, or one "
                                "w_gate_up; halves: rows of gate, then of up; interleaved: they "
                                "alternate",
                                {"separate", "halves", "interleaved"}));
  options.push_back(
      rare_option("bias", "whether gate, up and an expert's output have biases", {"none", "all"}));
  options.push_back(residual_option());
  options.push_back(
      rare_option("scales",
                  "granularity of fp8 scales: a whole tensor, of an expert; a token, and "
                  "a row of a weight; or blocks of 128 elements (in a weight 128 x "
                  "128)",
                  {"tensor", "token", "block"}, "fwd"));
  options.push_back(batch_invariant_option());
  options.push_back(accumulate_option("the weights and biases"));
  options.push_back(frozen_option("the weights and biases"));
  for (OptionField& field : packed_options()) options.push_back(std::move(field));
  options.push_back(quantise_option());
  return options;
}

/// The published configurations' hidden_size, moe_intermediate_size (or intermediate_size), experts
/// and experts of a token; and what differs from the options' defaults.
std::vector<KnownModel> models() {
  using Options = std::map<std::string, std::string>;
  const auto model = [](const char* name, std::int64_t d, std::int64_t h, std::int64_t experts,
                        std::int64_t choices, Options options = {}) {
    return KnownModel{
        name, {{"d", d}, {"h", h}, {"experts", experts}, {"top-k", choices}}, std::move(options)};
  };
  const Options gpt_oss{{"act", "swiglu-oai"}, {"bias", "all"}, {"gate-up", "interleaved"}};
  const KnownModel gpt_oss_20b = model("gpt-oss-20b", 2880, 2880, 32, 4, gpt_oss);
  const KnownModel gpt_oss_120b = model("gpt-oss-120b", 2880, 2880, 128, 4, gpt_oss);
  return {model("qwen3-30b-a3b", 2048, 768, 128, 8),
          model("qwen3-235b-a22b", 4096, 1536, 128, 8),
          model("qwen2-57b-a14b", 3584, 2560, 64, 8),
          model("mixtral-8x7b", 4096, 14336, 8, 2),
          model("mixtral-8x22b", 6144, 16384, 8, 2),
          model("deepseek-v2-lite", 2048, 1408, 64, 6),
          model("deepseek-v3", 7168, 2048, 256, 8),
          model("kimi-k2", 7168, 2048, 384, 8),
          model("glm-4.5", 5120, 1536, 160, 8),
          gpt_oss_20b,
          gpt_oss_120b,
          packed_model(gpt_oss_20b, "mxfp4"),
          packed_model(gpt_oss_120b, "mxfp4"),
          model("olmoe-1b-7b", 2048, 1024, 64, 8),
          model("llama-4-scout", 5120, 8192, 16, 1, {{"weigh", "before"}})};
}

OpFacts facts() {
  return {
      .name = "moe-ffn",
      .summary = "mixture of experts: y_t = sum_j weights_tj * ffn of expert ids_tj (x_t)",
      .sizes =
          {product_tokens(),
           {.name = "d", .help = "embedding size", .example = 2048},
           {.name = "h", .help = "intermediate size of an expert", .example = 768},
           moe_route::top_k_size(),
           moe_route::experts_size(),
           rare_size(
               "shared",
               "experts that every token goes through with weight 1, the last ones of the stacked "
               "weights; left out: none",
               most_shared, 1),
           own_experts_size()},
      .options = option_fields(),
      .rows_are_alike = false,
      .sharded_sizes = {"h"},
      .known_models = models,
      .families = {decode_families, own_ids_families, route_families, gemm_families,
                   combine_families, weigh_families, d_biases_families},
      .baselines = baselines};
}

class MoeFfn final : public DescribedOp {
 public:
  MoeFfn() : DescribedOp(facts()) {}

  std::vector<DType> dtypes(DeviceKind kind) const override {
    auto all = float_dtypes(kind);
    all.push_back(DType::fp8);
    return all;
  }
  std::vector<DType> dtypes_of_pass(DeviceKind kind, std::string_view pass) const override {
    return pass == "bwd" ? float_dtypes(kind) : dtypes(kind);
  }
  std::string contradiction(const Problem& problem) const override {
    const Shape shape = shape_of(problem);
    if (shape.top_k > shape.of_all)
      return fmt::format("top-k={} exceeds experts={}: the experts of a token differ", shape.top_k,
                         shape.of_all);
    if (shape.experts > shape.of_all)
      return fmt::format("own-experts={} exceeds experts={}: give how many of them are here",
                         shape.experts, shape.of_all);
    if (has_own_experts(problem) && shape.shared > 0)
      return "shared with own-experts: every rank would add the shared experts: leave them to a "
             "network of their own";
    if (shape.all_experts() > moe_route::most_experts)
      return fmt::format("experts={} and shared={}: together up to {}", shape.experts, shape.shared,
                         moe_route::most_experts);
    if (auto reason = frozen_contradiction(problem); !reason.empty()) return reason;
    const bool quantised = problem.dtype == DType::fp8;
    if (auto reason = quantise_contradiction(problem); !reason.empty()) return reason;
    if (packed_format(problem).packed) {
      const std::string_view code = code_name(packed_format(problem).code);
      if (quantised) return fmt::format("weights={} is for x of bf16, fp16 and f32, not fp8", code);
      if (packing_of(problem) != Packing::separate)
        return fmt::format("gate-up={} with weights={}: give gate and up a packed weight each",
                           problem.option("gate-up"), code);
      for (const char* name : {"d", "h"})
        if (problem.size(name) % packed_rows != 0)
          return fmt::format("{}={} with weights={}: give a multiple of {}, the rows of a tile",
                             name, problem.size(name), code, packed_rows);
    }
    for (const char* name : {"d", "h"})
      if (auto reason = packed_contradiction(problem, name, problem.size(name)); !reason.empty())
        return reason;
    if (!quantised && (problem.has("scales", "token") || problem.has("scales", "block")))
      return fmt::format("scales={} is for dtype fp8, not {}", problem.option("scales"),
                         dtype_name(problem.dtype));
    if (scales_of(problem) != Scales::none && packing_of(problem) == Packing::interleaved)
      return "gate-up=interleaved has no scales for fp8: use separate or halves";
    if (scales_of(problem) == Scales::block && packing_of(problem) == Packing::halves &&
        shape.h % scale_block != 0)
      return fmt::format(
          "h={} is not a multiple of {}: a block of gate-up=halves would be of gate and of up",
          shape.h, scale_block);
    return "";
  }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return *tensors_.of(problem, [&] {
      return problem.pass == "bwd" ? backward_tensors(problem) : forward_tensors(problem);
    });
  }
  std::vector<StageSpec> stages(const Problem& problem) const override {
    return *stages_.of(problem, [&] { return stages_of(problem); });
  }

  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    moe::reference(problem, stage_names(problem).at(stage), tensors, parallel);
  }

 private:
  static std::vector<StageSpec> stages_of(const Problem& problem) {
    const auto tensors = moe_ffn_op().tensors(problem);
    std::vector<StageSpec> stages;
    for (const std::string& name : stage_names(problem)) {
      if (name == ffn::stage_expand_gate_up || name == ffn::stage_expand_down) {
        const bool last = name == ffn::stage_expand_down;
        stages.push_back(
            expand_spec(name, last ? packed_down(problem) : packed_gate_up(problem), tensors));
        continue;
      }
      if (name == ffn::stage_quantise) {
        stages.push_back(quantise_spec(name, ffn::quantised_x(problem), tensors));
        continue;
      }
      const GemmStage* const gemm = gemm_stage(problem, name);
      stages.push_back(gemm ? stage_spec(name, gemm->gemm(problem), tensors)
                            : plain_stage(problem, name, tensors));
      // A slice has its share of the rows, which the GEMM has room for.
      const Shape shape = shape_of(problem);
      if (gemm && has_own_experts(problem))
        stages.back().flops *=
            static_cast<double>(shape.experts) / static_cast<double>(shape.of_all);
    }
    return stages;
  }

  mutable OfLastProblems<std::vector<TensorSpec>> tensors_;
  mutable OfLastProblems<std::vector<StageSpec>> stages_;
};

}  // namespace

SizeField own_experts_size() {
  return rare_size(
      "own-experts",
      "experts in the weights, the slice of a rank of a group: the tensor first_expert "
      "says which; all if left out",
      moe_route::most_experts, 64);
}

}  // namespace fftune::moe

const fftune::Op& fftune::moe_ffn_op() {
  static const moe::MoeFfn op;
  return op;
}
