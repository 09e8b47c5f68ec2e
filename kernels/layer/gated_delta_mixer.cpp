// Linear attention by the gated delta rule, as in Qwen3.5 and OLMo-Hybrid: q, k and v pass a short
// convolution with SiLU, the rule reads and writes a state of each value head, and its output is
// normalised, with a gate behind the norm. Kimi Delta Attention has decays of features, and a
// sigmoid in the gate.
//
// q, k and v have products and convolutions of their own, whose states are parts of one [batch,
// channels, width], as transformers' caches have it. With qkv-weights=packed they are columns of
// one product and of one convolution, which the rule reads in wider rows.
//
// With qkv-weights=grouped, as in Qwen3-Next, one product gives q, k, v and the gates z of the
// output, and another one beta and the decays' inputs a. The columns of a head of k
// are together:
//
//   qkvz   | q of head 0 | k | v of its value heads | z of these | q of head 1 | ...
//   ba     | beta of the value heads of head 0 | a of these | beta of those of head 1 | ...
//
// The convolution, the rule and the norm find their columns in these blocks.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kernels/causal_conv1d/causal_conv1d.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/gated_delta_rule/gated_delta_rule.hpp"
#include "kernels/gated_rmsnorm/gated_rmsnorm.hpp"
#include "kernels/layer/mixer.hpp"
#include "kernels/linear/linear.hpp"
#include "registry/part_family.hpp"

namespace fftune::layer {
namespace {

/// The decays' inputs and the gates of the output. Those of features may go by way of latents.
void add_gates(PartList& parts, const MixerPlace& place, std::int64_t decays, std::int64_t values) {
  const Problem& problem = parts.problem();
  const std::int64_t d = problem.size("d"), rank = size_or(problem, "gate-rank", 0);
  if (rank == 0) {
    add_plain_product(parts, {"in_a", place.x, "w_a", "decay_inputs"}, d, decays);
    add_plain_product(parts, {"in_z", place.x, "w_z", "output_gates"}, d, values);
    return;
  }
  add_plain_product(parts, {"in_a_low", place.x, "w_a_low", "decay_latents"}, d, rank);
  add_plain_product(parts, {"in_a", "decay_latents", "w_a", "decay_inputs"}, rank, decays);
  add_plain_product(parts, {"in_z_low", place.x, "w_z_low", "gate_latents"}, d, rank);
  add_plain_product(parts, {"in_z", "gate_latents", "w_z", "output_gates"}, rank, values);
}

/// Whether q, k and v have one product and one convolution.
bool is_packed(const Problem& problem) {
  return problem.has("qkv-weights", "packed") || problem.has("qkv-weights", "grouped");
}

/// With qkv-weights=grouped: where the columns of a head of k are.
struct Blocks {
  std::int64_t heads, group;  // heads of k, and value heads of each
  std::int64_t dim, v_dim;
  bool is_grouped;

  explicit Blocks(const Problem& problem)
      : heads(problem.size("heads")),
        group(size_or(problem, "v-heads", heads) / std::max<std::int64_t>(1, heads)),
        dim(problem.size("dim")),
        v_dim(problem.size("v-dim")),
        is_grouped(problem.has("qkv-weights", "grouped")) {}

  std::int64_t z() const { return 2 * dim + group * v_dim; }
  std::int64_t columns() const { return z() + group * v_dim; }
  std::int64_t a() const { return group; }
  std::int64_t gates() const { return 2 * group; }
};

constexpr StateConv whole_conv{"conv", "qkv_projected", "w_conv", "", "conv_state", "convolved"};
constexpr StateConv grouped_conv{"conv", "qkvz_projected", "w_conv", "", "conv_state", "convolved"};
constexpr StateConv v_conv{"conv_v", "v_projected", "w_conv_v", "", "conv_v_state", "v"};

PartList::Options rule_options(const Problem& problem, bool of_features) {
  PartList::Options rule{{"gate", "softplus"},
                         {"beta", "sigmoid"},
                         {"qk-norm", "l2"},
                         {"state-layout", option_or(problem, "state-layout", "kv")}};
  if (problem.options.contains("beta-scale")) rule["beta-scale"] = problem.option("beta-scale");
  if (of_features) rule["decay"] = "channel";
  if (problem.options.contains("gate-bound")) {
    rule["gate"] = "bounded";
    rule["gate-bound"] = problem.option("gate-bound");
  }
  return rule;
}

void add_delta_parts(PartList& parts, const MixerPlace& place, bool of_features) {
  const Problem& problem = parts.problem();
  const std::int64_t heads = problem.size("heads"), dim = problem.size("dim"),
                     v_heads = size_or(problem, "v-heads", heads), v_dim = problem.size("v-dim"),
                     keys = heads * dim, values = v_heads * v_dim, batch = problem.size("batch"),
                     d = problem.size("d"), channels = 2 * keys + values;
  const bool packed = is_packed(problem);
  const Blocks blocks(problem);
  if (blocks.is_grouped) {
    add_plain_product(parts, {"in_qkvz", place.x, "w_qkvz", "qkvz_projected"}, d,
                      heads * blocks.columns());
    add_plain_product(parts, {"in_ba", place.x, "w_ba", "ba_projected"}, d, heads * blocks.gates());
  } else if (packed) {
    add_plain_product(parts, {"in_qkv", place.x, "w_qkv", "qkv_projected"}, d, channels);
  } else {
    add_plain_product(parts, {"in_q", place.x, "w_q", "q_projected"}, d, keys);
    add_plain_product(parts, {"in_k", place.x, "w_k", "k_projected"}, d, keys);
    add_plain_product(parts, {"in_v", place.x, "w_v", "v_projected"}, d, values);
  }
  if (!blocks.is_grouped) {
    add_plain_product(parts, {"in_b", place.x, "w_b", "beta_logits"}, d, v_heads);
    add_gates(parts, place, of_features ? v_heads * dim : v_heads, values);
  }
  PartList::Sizes sizes{{"s", size_or(problem, "s", 1)},
                        {"b", batch},
                        {"heads", heads},
                        {"v-heads", v_heads},
                        {"dim", dim},
                        {"v-dim", v_dim}};
  PartList::Names names{{"a", "decay_inputs"}, {"out", "mixed"}};
  if (blocks.is_grouped) {
    add_state_conv(parts, grouped_conv, channels, channels, "no",
                   {.row = heads * blocks.columns(), .groups = heads, .keys = dim});
  } else if (packed) {
    add_state_conv(parts, whole_conv, channels, channels, "no");
  }
  if (packed) {
    for (const char* row : {"q-row", "k-row", "v-row"}) sizes[row] = channels;
    for (const char* name : {"q", "k", "v"}) names[name] = "convolved";
  } else {
    add_state_conv(parts, {"conv_q", "q_projected", "w_conv_q", "", "conv_q_state", "q"}, keys,
                   channels, "no");
    add_state_conv(parts, {"conv_k", "k_projected", "w_conv_k", "", "conv_k_state", "k"}, keys,
                   channels, "no");
    add_state_conv(parts, v_conv, values, channels, "no");
  }
  if (blocks.is_grouped) {
    sizes["gate-block"] = blocks.gates();
    names["a"] = names["beta_logits"] = "ba_projected";
  }
  PartList::Options options = rule_options(problem, of_features);
  add_head_states(problem, sizes, options);
  OpPart& rule = parts.add("rule", gated_delta_rule_op(), std::move(sizes), std::move(options),
                           std::move(names));
  if (packed) {
    set_first(rule, "k", keys);
    set_first(rule, "v", 2 * keys);
  }
  if (blocks.is_grouped) set_first(rule, "a", blocks.a());
  PartList::Sizes rows{{"m", parts.tokens() * v_heads}, {"d", v_dim}};
  PartList::Options norm{{"order", "after"},
                         {"gate", of_features ? "sigmoid" : "silu"},
                         {"convention", of_features ? "t5" : "llama"},
                         {"eps", option_or(problem, "mixer-eps", usual_eps)}};
  if (blocks.is_grouped) {
    rows["m"] = parts.tokens() * heads;
    rows["groups"] = blocks.group;
    rows["z-row"] = blocks.columns();
    norm["weights-for"] = "token";
  }
  OpPart& gated = parts.add("gated_norm", gated_rmsnorm_op(), std::move(rows), std::move(norm),
                            {{"x", "mixed"},
                             {"z", blocks.is_grouped ? "qkvz_projected" : "output_gates"},
                             {"w", "mixer_norm"},
                             {"y", "gated"}});
  if (blocks.is_grouped) set_first(gated, "z", blocks.z());
  add_out_product(parts, place, "gated", values);
}

/// Decays are about those of their biases, as models begin with.
void set_kimi_draw(const Problem& problem, TensorSpec& tensor) {
  if (tensor.name == "w_a") tensor.scale *= 0.25;
  for (const StateConv& conv : {whole_conv, v_conv})
    set_alike_draw(tensor, conv, problem.size("width"));
}

std::vector<PartKind> delta_part_kinds() {
  std::vector<PartKind> kinds;
  for (const char* name : {"in_qkvz", "in_ba", "in_qkv", "in_q", "in_k", "in_v", "in_b", "in_a_low",
                           "in_a", "in_z_low", "in_z"})
    kinds.push_back(mixer_product_kind(name));
  for (const char* name : {"conv", "conv_q", "conv_k", "conv_v"})
    kinds.push_back({name, causal_conv1d_op, {stage_forward}});
  kinds.push_back({"rule", gated_delta_rule_op, {stage_forward}});
  kinds.push_back({"gated_norm", gated_rmsnorm_op, {stage_forward}});
  return kinds;
}

std::string delta_contradiction(const Problem& problem) {
  if (!is_packed(problem)) {
    if (problem.has("conv-order", "entries"))
      return "conv-order=entries with qkv-weights=separate: states of q, k and v are channels of "
             "one";
    return "";
  }
  if (const Blocks blocks(problem); blocks.is_grouped) {
    if (problem.has("mixer", "kda"))
      return "qkv-weights=grouped with mixer=kda: q, k and v are separate, or packed";
    if (auto reason = contradiction_of_columns(problem, "z", {blocks.z(), blocks.columns()});
        !reason.empty())
      return reason;
  }
  const std::int64_t keys = problem.size("heads") * problem.size("dim");
  const std::int64_t values =
      size_or(problem, "v-heads", problem.size("heads")) * problem.size("v-dim");
  return contradiction_of_columns(problem, "k", {keys, 2 * keys + values});
}

}  // namespace

const Mixer& gated_delta_mixer() {
  static const Mixer mixer{
      .name = "gated-delta-rule",
      .summary = "linear attention by the gated delta rule behind short convolutions",
      .needed = {"heads", "dim", "v-dim", "width"},
      .fields = with_fields({"v-heads", "qkv-weights", "beta-scale", "mixer-eps", "state-layout"},
                            head_state_fields()),
      .shared_inputs = {"state_indices"},
      .inputs = {"w_q",        "w_k",        "w_v",          "w_qkv",        "w_qkvz",
                 "w_ba",       "w_z",        "w_b",          "w_a",          "w_conv",
                 "w_conv_q",   "w_conv_k",   "w_conv_v",     "A_log",        "dt_bias",
                 "mixer_norm", "conv_state", "conv_q_state", "conv_k_state", "conv_v_state",
                 "states"},
      .add_parts = [](PartList& parts,
                      const MixerPlace& place) { add_delta_parts(parts, place, false); },
      .part_kinds = delta_part_kinds,
      .contradiction = delta_contradiction};
  return mixer;
}

const Mixer& kimi_delta_mixer() {
  static const Mixer mixer{
      .name = "kda",
      .summary = "Kimi Delta Attention, the gated delta rule with a decay of each feature",
      .needed = {"heads", "dim", "v-dim", "width"},
      .fields = with_fields(
          {"v-heads", "qkv-weights", "gate-rank", "gate-bound", "mixer-eps", "state-layout"},
          head_state_fields()),
      .shared_inputs = {"state_indices"},
      .inputs = {"w_q",        "w_k",        "w_v",          "w_qkv",        "w_z_low",
                 "w_z",        "w_b",        "w_a_low",      "w_a",          "w_conv",
                 "w_conv_q",   "w_conv_k",   "w_conv_v",     "A_log",        "dt_bias",
                 "mixer_norm", "conv_state", "conv_q_state", "conv_k_state", "conv_v_state",
                 "states"},
      .add_parts = [](PartList& parts,
                      const MixerPlace& place) { add_delta_parts(parts, place, true); },
      .part_kinds = delta_part_kinds,
      .contradiction = delta_contradiction,
      .set_draw = set_kimi_draw};
  return mixer;
}

}  // namespace fftune::layer
