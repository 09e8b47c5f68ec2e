#include "kernels/layer/mixer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <span>
#include <utility>

#include "kernels/causal_conv1d/causal_conv1d.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/test_data.hpp"
#include "kernels/gated_rmsnorm/gated_rmsnorm.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/scale/scale.hpp"
#include "registry/part_family.hpp"

namespace fftune::layer {
namespace {

/// Entries of the caches of states.
std::int64_t entries_of_states(const Problem& problem) {
  return size_or(problem, "states", problem.size("batch"));
}

bool lists_field(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

PartList::PartList(const Problem& problem)
    : problem_(problem), tokens_(problem.size("batch") * size_or(problem, "s", 1)) {}

OpPart& PartList::add(const char* name, const Op& op, Sizes sizes, Options options, Names names,
                      std::optional<DType> dtype) {
  // The kind of device decides about dtypes alone: those that CUDA has not, no op has.
  parts_.push_back({name, &op,
                    canonical(op,
                              {std::string(op.name()), "fwd", dtype.value_or(problem_.dtype),
                               std::move(sizes), std::move(options)},
                              DeviceKind::cuda),
                    std::move(names)});
  return parts_.back();
}

void PartList::add_format(Options& options) const {
  for (const char* name : {"group", "zeros"})
    if (problem_.options.contains(name)) options[name] = problem_.option(name);
}

std::string PartList::quantise() const {
  return option_or(problem_, "quantise", "no");
}

std::string PartList::scales() const {
  return problem_.options.contains("residual-scale") ? "yes" : "no";
}

std::string PartList::scale_of(const char* part) const {
  return problem_.has("residual-scale", "each") ? part : "residual_scale";
}

const std::vector<const Mixer*>& mixers() {
  static const std::vector<const Mixer*> all{
      &attention_mixer(),  &conv_mixer(), &mla_mixer(),           &gated_delta_mixer(),
      &kimi_delta_mixer(), &ssd_mixer(),  &attention_ssd_mixer(), &no_mixer()};
  return all;
}

const Mixer& no_mixer() {
  static const Mixer mixer{.name = "none",
                           .summary = "for layers that are a feed-forward network alone",
                           .needed = {},
                           .fields = {},
                           .shared_inputs = {},
                           .inputs = {},
                           .add_parts = [](PartList&, const MixerPlace&) {},
                           .part_kinds = [] { return std::vector<PartKind>{}; }};
  return mixer;
}

const Mixer& mixer_of(const Problem& problem) {
  for (const Mixer* mixer : mixers())
    if (problem.has("mixer", std::string(mixer->name))) return *mixer;
  return *mixers().front();
}

namespace {

bool has_field(const Mixer& mixer, const std::string& name) {
  return lists_field(mixer.needed, name) || lists_field(mixer.fields, name);
}

}  // namespace

bool is_field_of_mixer(const Problem& problem, const std::string& name) {
  const auto has_it = [&](const Mixer* mixer) { return has_field(*mixer, name); };
  return has_it(&mixer_of(problem)) || std::none_of(mixers().begin(), mixers().end(), has_it);
}

std::string contradiction_of_mixer(const Problem& problem) {
  const Mixer& own = mixer_of(problem);
  for (const std::string& name : own.needed)
    if (!problem.sizes.contains(name))
      return fmt::format("mixer={} without {}: give the size", own.name, name);
  for (const Mixer* other : mixers()) {
    for (const auto* names : {&other->needed, &other->fields})
      for (const std::string& name : *names) {
        if (has_field(own, name)) continue;
        if (const auto size = problem.sizes.find(name); size != problem.sizes.end())
          return fmt::format("{}={} is of mixer={}", name, size->second, other->name);
        if (const auto option = problem.options.find(name); option != problem.options.end())
          return fmt::format("{}={} is of mixer={}", name, option->second, other->name);
      }
  }
  return own.contradiction == nullptr ? "" : own.contradiction(problem);
}

bool mixer_needs(const Problem& problem, const std::string& size) {
  return lists_field(mixer_of(problem).needed, size);
}

void add_mixer_product(PartList& parts, const char* name, PartList::Sizes sizes,
                       PartList::Options options, PartList::Names names, const std::string& w,
                       const char* bias) {
  const Problem& problem = parts.problem();
  sizes["m"] = parts.tokens();
  if (packs_attention(problem)) {
    options["weights"] = problem.option("weights");
    parts.add_format(options);
  }
  if (!has_dense_attention(problem)) options["quantise"] = parts.quantise();
  const std::string x = names.at("x");
  names.insert({{"x_quantised", x + "_quantised"},
                {"x_scale", x + "_scale"},
                {"w", w},
                {"w_scale", w + "_scale"},
                {"w_zero", w + "_zero"},
                {"w_dense", w + "_dense"},
                {"bias", bias}});
  parts.add(name, linear_op(), std::move(sizes), std::move(options), std::move(names));
}

PartKind mixer_product_kind(const char* name) {
  return {name, linear_op, {linear::stage_expand, linear::stage_quantise, linear::stage_product}};
}

void add_in_product(PartList& parts, const MixerPlace& place, std::int64_t columns,
                    const std::string& bias) {
  add_mixer_product(parts, "in", {{"k", parts.problem().size("d")}, {"n", columns}},
                    {{"bias", bias}, {"y-scale", option_or(parts.problem(), "in-scale", "no")}},
                    {{"x", place.x}, {"y_scale", "in_scale"}, {"y", "projected"}}, "w_in", "b_in");
}

const char* add_output_gate(PartList& parts, const MixerPlace& place, std::int64_t dim) {
  const Problem& problem = parts.problem();
  const std::string gate = option_or(problem, "output-gate", "no");
  if (gate == "no") return "attended";
  const std::int64_t heads = problem.size("heads");
  if (gate != "q-rows")
    add_mixer_product(parts, "gate",
                      {{"k", problem.size("d")}, {"n", gate == "heads" ? heads : heads * dim}},
                      {{"bias", "no"}}, {{"x", place.x}, {"y", "output_gates"}}, "w_g", "b_g");
  parts.add(
      "gated", gated_rmsnorm_op(), {{"m", parts.tokens()}, {"groups", heads}, {"d", dim}},
      {{"norm", "none"}, {"gate", "sigmoid"}, {"gate-for", gate == "heads" ? "norm" : "feature"}},
      {{"x", "attended"}, {"z", "output_gates"}, {"y", "gated"}});
  return "gated";
}

PartKind output_gate_kind() {
  return {"gated", gated_rmsnorm_op, {stage_forward}};
}

const char* add_query_scale(PartList& parts, const char* from, const char* to,
                            std::int64_t features) {
  if (!parts.problem().has("query-scale", "rows")) return from;
  parts.add("q_scale", scale_op(), {{"m", parts.tokens()}, {"h", features}},
            {{"in-place", "no"}, {"factor", "rows"}},
            {{"x", from}, {"factor", "q_factors"}, {"y", to}});
  return to;
}

PartKind query_scale_kind() {
  return {"q_scale", scale_op, {stage_forward}};
}

void add_plain_product(PartList& parts, const PlainProduct& product, std::int64_t k,
                       std::int64_t n) {
  add_mixer_product(parts, product.name, {{"k", k}, {"n", n}}, {{"bias", "no"}},
                    {{"x", product.x}, {"y", product.y}}, product.w, "");
}

std::string contradiction_of_columns(const Problem& problem, const char* name,
                                     const Columns& columns) {
  // Kernels take rows that are multiples of a vector to begin at such ones.
  const auto vector = static_cast<std::int64_t>(16 / dtype_bytes(problem.dtype));
  if (columns.first % std::gcd(columns.row, vector) == 0) return "";
  return fmt::format("mixer={}: {} begins at column {} of rows of {}, which are more aligned",
                     problem.option("mixer"), name, columns.first, columns.row);
}

std::vector<std::string> conv_state_fields() {
  return {"states", "null-index", "conv-indices", "conv-entries", "conv-order", "conv-block"};
}

std::vector<std::string> head_state_fields() {
  return with_fields(conv_state_fields(), {"state-block", "state-dtype"});
}

std::vector<std::string> with_fields(std::vector<std::string> fields,
                                     const std::vector<std::string>& more) {
  fields.insert(fields.end(), more.begin(), more.end());
  return fields;
}

void add_conv_states(const Problem& problem, std::int64_t channels, PartList::Sizes& sizes,
                     PartList::Options& options, PartList::Names& names) {
  const std::int64_t entries = size_or(problem, "conv-entries", problem.size("width"));
  sizes["entries"] = entries;
  sizes["state-row"] = size_or(problem, "conv-block", channels * entries);
  options["state"] = "update";
  options["state-order"] = option_or(problem, "conv-order", "channels");
  if (!problem.has("conv-indices", "yes")) return;
  sizes["slots"] = entries_of_states(problem);
  names["indices"] = "state_indices";
  options["first-slot"] = problem.has("null-index", "0") ? "1" : "0";
}

void add_head_states(const Problem& problem, PartList::Sizes& sizes, PartList::Options& options) {
  sizes["states"] = entries_of_states(problem);
  if (problem.sizes.contains("state-block")) sizes["state-block"] = problem.size("state-block");
  options["indices"] = "yes";
  options["state-dtype"] = option_or(problem, "state-dtype", "f32");
  options["null-index"] = option_or(problem, "null-index", "-1");
}

void set_index_draw(const Problem& problem, TensorSpec& tensor) {
  if (tensor.name != "state_indices" || !problem.has("conv-indices", "yes")) return;
  const std::int64_t null = problem.has("null-index", "0") ? 0 : -1;
  tensor.draw = [null, states = entries_of_states(problem)](std::uint64_t seed,
                                                            std::span<double> values) {
    std::mt19937_64 random(seed);
    const std::vector<double> order = shuffled(null + 1, states, random);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const bool is_sequence = i < order.size() && (i == 0 || random() % 8 != 0);
      values[i] = is_sequence ? order[i] : static_cast<double>(null);
    }
  };
}

void add_state_conv(PartList& parts, const StateConv& conv, std::int64_t channels,
                    std::int64_t state_channels, const std::string& has_bias, const Columns& of_x) {
  const Problem& problem = parts.problem();
  PartList::Sizes sizes{{"s", size_or(problem, "s", 1)},
                        {"b", problem.size("batch")},
                        {"channels", channels},
                        {"width", problem.size("width")},
                        {"x-row", of_x.row == 0 ? channels : of_x.row}};
  PartList::Options options{{"layout", "bsc"}, {"act", "silu"}, {"bias", has_bias}};
  PartList::Names names{
      {"x", conv.x}, {"w", conv.w}, {"bias", conv.bias}, {"state", conv.state}, {"y", conv.y}};
  if (of_x.groups > 0) sizes["x-groups"] = of_x.groups, sizes["x-keys"] = of_x.keys;
  add_conv_states(problem, state_channels, sizes, options, names);
  OpPart& part = parts.add(conv.name, causal_conv1d_op(), std::move(sizes), std::move(options),
                           std::move(names));
  set_first(part, "x", of_x.first);
}

void set_alike_draw(TensorSpec& tensor, const StateConv& conv, std::int64_t width) {
  const auto set = [&](double mean, double scale) { tensor.mean = mean, tensor.scale = scale; };
  if (tensor.name == conv.w) set(1.2 / static_cast<double>(width - 1), 0.1);
  if (tensor.name == conv.bias) set(0, 0.2);
  if (tensor.name == conv.state) set(2, 0.3);
}

void add_out_product(PartList& parts, const MixerPlace& place, const char* x, std::int64_t features,
                     const OutProduct& product) {
  const bool has_bias = *product.bias != '\0' && parts.problem().has("out-bias", "yes");
  add_mixer_product(parts, product.name, {{"k", features}, {"n", parts.problem().size("d")}},
                    {{"bias", has_bias ? "yes" : "no"},
                     {"y-scale", parts.scales()},
                     {"residual", place.adds ? "yes" : "no"}},
                    {{"x", x},
                     {"y_scale", parts.scale_of(product.scale)},
                     {"residual", place.residual},
                     {"y", place.y}},
                    product.w, product.bias);
}

}  // namespace fftune::layer
