// layer: its fields, and what follows from its parts: tensors, stages, families, the definition.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "device/group_layout.hpp"
#include "kernels/causal_conv1d/causal_conv1d.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/cache_format.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/part_stages.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "kernels/gemm/quantise/quantise.hpp"
#include "kernels/layer/layer.hpp"
#include "kernels/layer/mixer.hpp"
#include "kernels/mla/mla.hpp"
#include "kernels/moe/moe.hpp"
#include "kernels/moe_route/moe_route.hpp"
#include "kernels/rope/rope.hpp"
#include "kernels/ssd/ssd.hpp"
#include "registry/last_problems.hpp"
#include "registry/part_family.hpp"

namespace fftune::layer {
namespace {

constexpr std::int64_t most_layers = 256;

/// Inputs that all layers of a plan share; those of mixers are behind the first.
constexpr const char* shared_inputs[] = {"x", "group", "first_expert"};

/// The tensors of a layer of its own, in the order of the buffers: in front of the mixer's and
/// behind them.
constexpr const char* inputs_before_mixer[] = {"attn_norm", "attn_norm_bias"};
constexpr const char* inputs_behind_mixer[] = {
    "residual_scale", "w_o",          "w_o_scale",       "w_o_zero",         "b_o",
    "attn_post_norm", "ffn_norm",     "ffn_norm_bias",   "w_router",         "b_router",
    "choice_bias",    "expert_scale", "router_norm",     "experts_norm",     "w_gate",
    "w_up",           "w_gate_up",    "w_down",          "w_gate_scale",     "w_gate_zero",
    "w_up_scale",     "w_up_zero",    "w_gate_up_scale", "w_down_scale",     "w_down_zero",
    "b_gate",         "b_up",         "b_gate_up",       "b_down",           "w_shared_router",
    "w_shared_gate",  "w_shared_up",  "w_shared_down",   "shared_post_norm", "experts_post_norm",
    "ffn_post_norm",  "w_input_gate", "out_scale",       "ssm_scale",        "gate_scale",
    "ffn_scale",      "w_ssm_out",    "w_ssm_out_scale", "w_ssm_out_zero",   "layer_input",
    "w_input_out",    "input_norm",   "layer_scalar"};

/// All inputs that there may be: those that layers share, and then those of a layer.
struct InputOrder {
  std::vector<std::string> names;
  std::size_t shared = 0;

  InputOrder() {
    names.emplace_back(shared_inputs[0]);
    add_of_mixers(&Mixer::shared_inputs);
    names.insert(names.end(), std::begin(shared_inputs) + 1, std::end(shared_inputs));
    shared = names.size();
    names.insert(names.end(), std::begin(inputs_before_mixer), std::end(inputs_before_mixer));
    add_of_mixers(&Mixer::inputs);
    names.insert(names.end(), std::begin(inputs_behind_mixer), std::end(inputs_behind_mixer));
  }

  std::ptrdiff_t place(const std::string& name) const {
    return std::find(names.begin(), names.end(), name) - names.begin();
  }

 private:
  /// A mixer's tensors keep their order: new ones stand in front of those that others have too. The
  /// mixer that has those of two others begins, for these say nothing of each other.
  void add_of_mixers(std::vector<const char*> Mixer::*inputs) {
    std::vector<const Mixer*> all{&attention_ssd_mixer()};
    all.insert(all.end(), mixers().begin(), mixers().end());
    for (const Mixer* mixer : all) {
      const auto& own = mixer->*inputs;
      std::ptrdiff_t next = std::ssize(names);
      for (auto name = own.rbegin(); name != own.rend(); ++name)
        if (const auto known = place(*name); known < std::ssize(names))
          next = known;
        else
          names.insert(names.begin() + next, *name);
    }
  }
};

const InputOrder& input_order() {
  static const InputOrder order;
  return order;
}

/// Where the tensor stands among the inputs.
std::ptrdiff_t rank_of(const std::string& name) {
  return input_order().place(name);
}

Problem one_layer(const Problem& problem) {
  Problem one = problem;
  one.sizes.erase("layers");
  return one;
}

/// Test data of inputs that are no noise, and of what the router chooses by.
void set_draw(const Problem& problem, TensorSpec& tensor) {
  if (const Mixer& mixer = mixer_of(problem); mixer.set_draw != nullptr)
    mixer.set_draw(problem, tensor);
  set_index_draw(problem, tensor);
  if (has_experts(problem)) set_routed_draw(problem, tensor);
}

/// Those of the parts, each once: what one part writes for another is an intermediate.
std::vector<TensorSpec> tensors_of_one(const Problem& problem) {
  std::vector<TensorSpec> inputs, outputs, intermediates;
  for (const OpPart& part : parts_of(problem))
    for (TensorSpec tensor : part.op->tensors(part.problem)) {
      tensor.name = part.tensor(tensor.name);
      TensorSpec* known = nullptr;
      for (auto* tensors : {&inputs, &outputs, &intermediates})
        if (const auto place = find_tensor(*tensors, tensor.name)) known = &(*tensors)[*place];
      // Which ids a part expects, the part that writes them does not know. The last one that reads
      // them, the experts, expects more of them than a table of their factors does.
      if (known && tensor.draw && known->role == Role::intermediate) known->draw = tensor.draw;
      if (known) continue;
      if (tensor.role == Role::output && tensor.name != "y") tensor.role = Role::intermediate;
      set_draw(problem, tensor);
      (tensor.role == Role::output         ? outputs
       : tensor.role == Role::intermediate ? intermediates
                                           : inputs)
          .push_back(std::move(tensor));
    }
  std::stable_sort(inputs.begin(), inputs.end(), [](const TensorSpec& a, const TensorSpec& b) {
    return rank_of(a.name) < rank_of(b.name);
  });
  inputs.insert(inputs.end(), std::make_move_iterator(outputs.begin()),
                std::make_move_iterator(outputs.end()));
  inputs.insert(inputs.end(), std::make_move_iterator(intermediates.begin()),
                std::make_move_iterator(intermediates.end()));
  return inputs;
}

/// The name of a tensor of layer `at` of `layers` among those of all layers.
std::string name_in_all(const std::string& name, std::int64_t at, std::int64_t layers) {
  if (name == "x" && at > 0) return fmt::format("layers.{}.y", at - 1);
  if (is_shared(name) || (name == "y" && at == layers - 1)) return name;
  return fmt::format("layers.{}.{}", at, name);
}

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  if (!problem.sizes.contains("layers")) return tensors_of_one(problem);
  const auto one = layer_op().tensors(one_layer(problem));
  const std::int64_t layers = problem.size("layers");
  std::vector<TensorSpec> inputs, intermediates;
  for (const TensorSpec& tensor : one)
    if (is_shared(tensor.name)) inputs.push_back(tensor);
  TensorSpec y;
  for (std::int64_t at = 0; at < layers; ++at)
    for (TensorSpec tensor : one) {
      if (is_shared(tensor.name)) continue;
      tensor.name = name_in_all(tensor.name, at, layers);
      if (tensor.name == "y") {
        y = std::move(tensor);
        continue;
      }
      if (tensor.role == Role::output) tensor.role = Role::intermediate;
      (tensor.role == Role::intermediate ? intermediates : inputs).push_back(std::move(tensor));
    }
  inputs.push_back(std::move(y));
  inputs.insert(inputs.end(), std::make_move_iterator(intermediates.begin()),
                std::make_move_iterator(intermediates.end()));
  return inputs;
}

// Sizes that are left out (SizeField::when_absent).

std::optional<std::int64_t> usual_rotary(const Problem& problem) {
  return problem.has("rotation", "none") ? std::nullopt : same_as("dim")(problem);
}
std::optional<std::int64_t> table_positions(const Problem& problem) {
  const bool has_table = problem.has("angles", "table") && !problem.has("rotation", "none");
  return has_table ? std::optional<std::int64_t>(4096) : std::nullopt;
}
std::optional<std::int64_t> usual_pages(const Problem& problem) {
  const std::int64_t page = size_or(problem, "page", 0);
  if (page == 0) return std::nullopt;
  return size_or(problem, "batch", 0) * ceil_div(size_or(problem, "cache", 0), page);
}

/// A size that must be given where the mixer needs it, and that others do without.
SizeField size_of_mixers(SizeField field) {
  field.is_needed = [name = field.name](const Problem& problem) {
    return mixer_needs(problem, name);
  };
  return field;
}

/// Those of rope that say how angles come about, as in qkv.
std::vector<OptionField> angle_options() {
  std::vector<OptionField> fields;
  for (OptionField field : rope_op().options()) {
    if (field.name == "angles") {
      field.choices = {"base", "table", "llama3", "yarn"};
      field.performance_neutral = true;
    } else if (!field.number) {
      continue;
    }
    if (field.name == "scale") field.name = "rope-scale";
    field.rare = true;
    fields.push_back(std::move(field));
  }
  return fields;
}

/// Fields that belong to ffn=moe alone, or are missing there.
std::string contradiction_of_experts(const Problem& problem) {
  if (has_experts(problem)) {
    for (const char* name : {"experts", "top-k"})
      if (!problem.sizes.contains(name))
        return fmt::format("ffn=moe without {}: give the number", name);
    if (problem.sizes.contains("own-experts") && !problem.sizes.contains("ranks"))
      return fmt::format("own-experts={} without ranks: a rank of a group has a slice",
                         problem.size("own-experts"));
    if (problem.has("shared-gate", "yes") && !problem.sizes.contains("shared-h"))
      return "shared-gate=yes without shared-h: give the network's intermediate size";
    if (!problem.has("expert-norms", "yes")) return "";
    if (!problem.sizes.contains("shared-h"))
      return "expert-norms=yes without shared-h: they are of experts beside another network";
    if (!problem.has("post-norms", "yes"))
      return "expert-norms=yes without post-norms=yes: their sum is normalised too";
    if (problem.has("shared-gate", "yes"))
      return "expert-norms=yes with shared-gate=yes: that network has a norm, and no gate";
    if (problem.sizes.contains("ranks"))
      return fmt::format("expert-norms=yes with ranks={}: norms need the sums over the ranks",
                         problem.size("ranks"));
    return "";
  }
  for (const char* name :
       {"experts", "top-k", "shared", "own-experts", "shared-h", "groups", "top-groups"})
    if (problem.sizes.contains(name))
      return fmt::format("{}={} is of ffn=moe", name, problem.size(name));
  for (const char* name : {"score", "order", "renormalise", "sum-eps", "routing", "gate-up",
                           "group-score", "choice-bias", "router-bias", "route-scale",
                           "shared-gate", "logits", "expert-norms", "expert-scale"})
    if (problem.options.contains(name))
      return fmt::format("{}={} is of ffn=moe", name, problem.option(name));
  return "";
}

/// Whether the part may have the stages that the family covers: it does not compute another pass.
bool has_stages(const PartKind& kind, const Family& family) {
  const auto own = family.stages();
  return std::all_of(own.begin(), own.end(), [&](const std::string& stage) {
    return std::find(kind.stages.begin(), kind.stages.end(), stage) != kind.stages.end();
  });
}

/// Fields that a layer without a mixer, or without a network, has not.
std::string contradiction_of_halves(const Problem& problem) {
  const bool mixes = &mixer_of(problem) != &no_mixer();
  if (mixes && has_network(problem)) return "";
  if (!mixes && !has_network(problem))
    return "mixer=none with ffn=none: a layer has at least one of them";
  const char* const lacks = mixes ? "ffn=none" : "mixer=none";
  if (problem.sizes.contains("ranks"))
    return fmt::format("{} with ranks={}: ranks have slices of layers with both halves", lacks,
                       problem.size("ranks"));
  if (problem.sizes.contains("input-h"))
    return fmt::format("{} with input-h={}: layers with both halves have inputs", lacks,
                       problem.size("input-h"));
  if (problem.options.contains("block"))
    return fmt::format("{} with block={}: there is one half alone", lacks, problem.option("block"));
  if (!mixes) {
    for (const char* name : {"out-bias", "attn-weights", "expert-norms"})
      if (problem.options.contains(name))
        return fmt::format("{}={} is of layers with a mixer", name, problem.option(name));
    return "";
  }
  if (problem.sizes.contains("h"))
    return fmt::format("h={} is of layers with a feed-forward network", problem.size("h"));
  if (problem.options.contains("ffn-bias"))
    return fmt::format("ffn-bias={} is of layers with a feed-forward network",
                       problem.option("ffn-bias"));
  if (!problem.has("act", "silu"))
    return fmt::format("act={} is of layers with a feed-forward network", problem.option("act"));
  return "";
}

/// relu(x)² is of networks without gates, by the kernels of those with gates.
std::string contradiction_of_squares(const Problem& problem) {
  if (!problem.has("act", "relu2")) return "";
  if (!has_experts(problem) && !problem.has("ffn", "plain"))
    return "act=relu2 with a gate: it is of ffn=plain and moe";
  for (const char* name : {"ffn-bias", "gate-up", "shared-gate", "weights", "quantise"})
    if (problem.options.contains(name))
      return fmt::format("act=relu2 with {}={}: there is no kernel for it", name,
                         problem.option(name));
  return "";
}

/// Factors of gates are of one network, by linear and act-mul.
std::string contradiction_of_gate_scale(const Problem& problem) {
  if (!problem.has("gate-scale", "yes")) return "";
  for (const char* name : {"ffn", "ffn-bias", "weights", "quantise"})
    if (problem.options.contains(name))
      return fmt::format("gate-scale=yes with {}={}: it is of dense networks with a gate", name,
                         problem.option(name));
  if (problem.sizes.contains("ranks"))
    return fmt::format("gate-scale=yes with ranks={}: there is no kernel for it",
                       problem.size("ranks"));
  return "";
}

std::vector<std::string> activations_of_networks() {
  auto names = gated_activation_names();
  names.emplace_back("relu2");
  return names;
}

std::vector<OptionField> network_options() {
  return {
      {"act",
       "activation of the feed-forward network; relu2: relu(x)² of networks without gates, which "
       "experts then have none of",
       activations_of_networks()},
      rare_option(
          "norm",
          "normalisation of rows: by the root mean square, or layer normalisation with biases",
          {"rms", "layer"}),
      rare_option("post-norms",
                  "whether the results of attention and of the feed-forward network are "
                  "normalised before they are added; only: their inputs are not",
                  {"no", "yes", "only"}),
      rare_option("residual-scale",
                  "whether a vector multiplies what is added to the residual; each: one of each "
                  "product; experts have route-scale",
                  {"no", "yes", "each"}),
      rare_option("gate-scale",
                  "whether a vector multiplies the gates of the feed-forward network in front of "
                  "their activation",
                  {"no", "yes"}),
      rare_option("expert-norms",
                  "whether the router, the experts and the network of shared-h, which is beside "
                  "them, each have norms of their own",
                  {"no", "yes"}),
      rare_option("expert-scale",
                  "whether the weight of a token's expert is multiplied by a number of the expert",
                  {"no", "yes"}),
      rare_option("layer-scalar", "whether one number multiplies the layer's output",
                  {"no", "yes"}),
      rare_option("block",
                  "serial: the feed-forward network follows attention; parallel: it takes the "
                  "same normalised x; parallel-norms: it takes x by a second norm",
                  {"serial", "parallel", "parallel-norms"}),
      rare_option("ffn",
                  "the feed-forward network: with a gate, plain without, a mixture of experts with "
                  "gates, or none in a layer that is its mixer alone",
                  {"gated", "plain", "moe", "none"}),
      rare_option("score", "function of a router's logit that gives an expert's score",
                  {"softmax", "sigmoid"}),
      rare_option("order",
                  "whether the router's softmax is over all experts, before the choice, or over "
                  "the chosen ones after it",
                  {"before", "after"}),
      rare_option("renormalise", "whether the weights of a token's experts add up to 1",
                  {"no", "yes"}),
      rare_option("sum-eps",
                  "added to the sum of a token's scores that its weights are divided by, as in "
                  "moe-route",
                  {"usual", "1e-06"}),
      rare_option("group-score",
                  "score of a group of experts: its best expert, or the sum of its best two",
                  {"max", "top2"}),
      rare_option("choice-bias",
                  "whether a bias is added to the experts' scores for the choice alone",
                  {"no", "yes"}),
      rare_option("logits", "element type of the router's logits: that of x, or f32",
                  {"same", "f32"}),
      rare_option("router-bias", "whether the router's product has a bias", {"no", "yes"}),
      rare_number("route-scale", "a factor of the weights of a token's experts", "1", {1e-6, 1e6}),
      rare_option("shared-gate",
                  "whether the network of shared-h is weighted by the sigmoid of a product of "
                  "its own",
                  {"no", "yes"}),
      rare_option("gate-up",
                  "the experts' weights of gate and up: separate, or one w_gate_up; halves: "
                  "rows of gate, then of up; interleaved: they alternate",
                  {"separate", "halves", "interleaved"}),
      {.name = "routing",
       .help = "distribution of the chosen experts, for test data and the choice of a preset",
       .choices = {"uniform"},
       .rare = true,
       .routing = true}};
}

std::vector<OptionField> norm_and_attention_options() {
  return {
      rare_option("convention",
                  "where the norms round, and whether weights are kept as their distance from 1",
                  {"llama", "gemma", "t5"}),
      rare_number("eps", "added to the norms' mean square", "1e-06", {0, 1}),
      rare_option("qkv-bias", "whether q, k and v have a bias", {"no", "yes"}),
      rare_option("qkv-weights",
                  "the weights of q, k and v: separate, or one w_qkv; packed: all rows of q, then "
                  "k, then v; grouped: for each head of k its heads of q, then k, then v; with "
                  "mixer=gated-delta-rule q, k, v and z in w_qkvz, and b and a in w_ba",
                  {"separate", "packed", "grouped"}),
      rare_option("qk-norm",
                  "norms of q and k; yes: RMSNorm of each head; rows: RMSNorm over all heads; "
                  "layer: layer normalisation of each head",
                  {"no", "yes", "rows", "layer"}),
      rare_option("qk-norm-order", "whether heads are normalised before RoPE or after it",
                  {"before", "after"}),
      rare_option("v-norm", "whether each head of v has an RMSNorm, without weights",
                  {"no", "yes"}),
      rare_option("keys",
                  "whether the layer has keys and values of its own, or reads those of another one "
                  "in its caches",
                  {"own", "shared"}),
      rare_option("query-scale", "whether the queries of each token have a factor", {"no", "rows"}),
      rare_option("sinks",
                  "whether each head has a logit that joins attention's softmax without a value",
                  {"no", "yes"}),
      rare_number("beta-scale", "factor of beta in mixer=gated-delta-rule", "1", {0, 2}),
      rare_number("gate-bound",
                  "mixer=kda: the decays' bound, which sigmoids approach; 0: decays by softplus",
                  "0", {-100, 0}),
      rare_number("dt-min", "mixer=ssd: the least step", "0", {0, 1e6}),
      rare_number("dt-max", "mixer=ssd: the largest step; 0: no limit", "0", {0, 1e6}),
      rare_option("mixer-norm", "mixer=ssd: the norm of what its gate has multiplied, or none",
                  {"gated", "none"}),
      rare_option("in-scale",
                  "mixer=ssd: whether a vector multiplies the result of the product in front of it",
                  {"no", "yes"}),
      rare_number("mixer-eps", "added to the mean square of a mixer's own norm", "1e-06", {0, 1}),
      rare_option(
          "output-gate",
          "sigmoids of a product of attention's input that multiply its output: one for "
          "each feature, or for each head; q-rows: for each feature, and w_q has behind the "
          "rows of each head those of its gates",
          {"no", "features", "heads", "q-rows"}),
      rare_option("conv-bias",
                  "whether a mixer's convolution has a bias, and with mixer=conv the product in "
                  "front of it",
                  {"no", "yes"}),
      rare_option("conv-indices",
                  "whether state_indices find the states of a mixer's convolutions too: a sequence "
                  "whose index is null-index keeps them",
                  {"no", "yes"}),
      rare_option("conv-order",
                  "order of a convolution's state: [channels, entries] or [entries, channels]",
                  {"channels", "entries"}),
      rare_option("state-layout",
                  "mixer=gated-delta-rule and kda: states [dim, v-dim] or [v-dim, dim]",
                  {"kv", "vk"}),
      rare_option("state-dtype", "element type of states of heads", {"f32", "bf16"}),
      rare_option("null-index",
                  "the index of a sequence that is padding and keeps its states: lower ones are "
                  "padding too",
                  {"-1", "0"}),
      rare_option("out-bias", "whether the output product has a bias", {"no", "yes"}),
      rare_option("ffn-bias", "whether the feed-forward network has biases", {"no", "yes"}),
      rare_option("rotation", "RoPE of q and k: pairs rotary/2 apart, neighbours, or none",
                  {"halves", "interleaved", "none"}),
      rare_option("rope-order", "mixer=mla: order of rotated neighbours, as in mla-rope",
                  {"same", "halves"}),
      rare_number("latent-eps", "mixer=mla: added to the mean square of the latents' norms",
                  usual_eps, {0, 1}),
      rare_number("softcap", "soft cap c of attention's scores, c tanh(x / c); 0: none", "0",
                  {0, 1e6}),
      rare_number("scale",
                  "scale of attention's scores; 0: 1 / sqrt(dim), or 1 / sqrt(nope + rope)", "0",
                  {0, 1e6}),
      rare_option("link",
                  "how ranks sum; peers: through a group's memory; nccl: by NCCL; loopback: one "
                  "rank plays all, with equal summands",
                  {"loopback", "peers", "nccl"}),
      rare_option("lengths",
                  "keys of the sequences in tests and measurements: as many as the cache has room "
                  "for, or fewer",
                  {"full", "ragged"})};
}

OptionField mixer_option() {
  std::string help = "what mixes the tokens";
  std::vector<std::string> names;
  for (const Mixer* mixer : mixers()) {
    help += fmt::format("{} {}, {}", names.empty() ? ":" : ";", mixer->name, mixer->summary);
    names.emplace_back(mixer->name);
  }
  return rare_option("mixer", std::move(help), std::move(names));
}

std::vector<OptionField> option_fields() {
  std::vector<OptionField> fields = network_options();
  for (auto* more : {norm_and_attention_options, angle_options})
    for (OptionField& field : more()) fields.push_back(std::move(field));
  for (OptionField& field : packed_options()) {
    if (field.name == "weights")
      field.help =
          "format of w_qkv, the output product and the gated network or experts: dense, or packed "
          "as linear has it";
    fields.push_back(std::move(field));
  }
  fields.push_back(rare_option(
      "attn-weights",
      "with packed weights or quantise: attention's weights have the network's format, or are "
      "dense, as in gpt-oss",
      {"same", "dense"}));
  fields.push_back(quantise_option());
  fields.push_back(mixer_option());
  for (OptionField& field : cache_format_options()) fields.push_back(std::move(field));
  return fields;
}

// The baseline that a user would take is another library's kernels: bench/ compares with PyTorch's.
OpFacts facts() {
  return {
      .name = "layer",
      .summary =
          "transformer layers: norm, qkv into the cache, attention over it, output product, norm, "
          "feed-forward network or mixture of experts",
      .passes = {"fwd"},
      .sizes =
          {{.name = "batch",
            .help = "sequences",
            .max = 65536,
            .default_on_cuda = {1, 16, 64},
            .default_on_cpu = {1, 4},
            .example = 4},
           {.name = "d", .help = "features of a token", .example = 1024},
           {.name = "h",
            .help = "intermediate size of the feed-forward network, or of an expert",
            .example = 2048,
            .is_needed = has_network},
           size_of_mixers({.name = "heads",
                           .help = "heads of q; with mixer=conv heads and dim make its channels",
                           .max = 1024,
                           .example = 16}),
           size_of_mixers({.name = "dim", .help = "features of a head", .max = 512, .example = 64}),
           size_of_mixers({.name = "cache",
                           .help = "keys that the cache has room for, of a sequence; not of "
                                   "mixers with a state",
                           .max = 1 << 24,
                           .example = 2048}),
           kv_heads_size("heads of k, and of v", 1024, 4),
           rare_size("s", "new tokens of each sequence; 1 if left out", 1 << 24, 512, usually(1)),
           rare_size("layers", "number of layers, each with its own weights and caches",
                     most_layers, 16),
           rare_size("experts", "experts to choose from, with ffn=moe", moe_route::most_experts,
                     128),
           rare_size("top-k", "experts that a token chooses", moe_route::most_choices, 8),
           rare_size("width", "taps of a mixer's convolution, 2 to 8", causal_conv1d::most_width,
                     3),
           rare_size("nope", "mixer=mla: features of a head of q that are not rotated", 512, 128),
           rare_size("rope", "mixer=mla: those that are, and features of the rotated key",
                     mla::most_rope, 64),
           rare_size("v-dim", "mixer=mla, gated-delta-rule and kda: features of a head's values",
                     512, 128),
           rare_size("rank", "mixer=mla: features of the latent of keys and values", mla::most_rank,
                     512),
           rare_size("q-rank", "mixer=mla: those of the queries' latent; none if left out", 1 << 24,
                     1536),
           rare_size("v-heads",
                     "mixer=gated-delta-rule and kda: heads of v, a multiple of heads; as many if "
                     "left out",
                     1024, 32),
           rare_size("gate-rank",
                     "mixer=kda: features between two products to the decays, and to the gates of "
                     "the output; one product each if left out",
                     1 << 24, 128),
           neutral(rare_size("states", "entries of the caches of states; batch if left out",
                             1 << 24, 65, same_as("batch"))),
           rare_size("state-block",
                     "elements from an entry of the cache of states of heads to the next, for a "
                     "part of a page; contiguous if left out",
                     std::int64_t{1} << 34, 1 << 20),
           rare_size("conv-block", "as state-block, for states of a convolution",
                     std::int64_t{1} << 34, 1 << 21),
           rare_size("conv-entries",
                     "inputs that a convolution's state holds, width - 1 or more; width if left "
                     "out",
                     causal_conv1d::most_entries, 3, same_as("width")),
           rare_size("state-dim", "mixer=ssd: features of a group of B and C", ssd::most_dim, 128),
           rare_size("state-groups",
                     "mixer=ssd: groups of heads that share B and C, and have a norm", 1024, 8),
           rare_size("ssm-heads", "mixer=attention-ssd: heads of ssd; heads are those of attention",
                     1024, 24),
           rare_size("ssm-dim", "mixer=attention-ssd: features of a head of ssd", 512, 64),
           rare_size("shared", "experts that every token goes through; left out: none",
                     moe::most_shared, 1),
           moe::own_experts_size(),
           rare_size(
               "shared-h",
               "intermediate size of a network with weights of its own beside the experts, for "
               "every token; left out: none",
               1 << 24, 1408),
           rare_size("input-h",
                     "features of an input of the layer's own for each token, which a gate of its "
                     "output takes; left out: none",
                     1 << 24, 256),
           rare_size("groups", "groups of experts: a token uses the best ones; left out: none", 32,
                     8),
           rare_size("top-groups", "groups that a token uses; all if left out", 32, 4,
                     same_as("groups")),
           rare_size("window", "keys of a query at most, the nearest; all if left out", 1 << 30,
                     4096),
           rare_size("rotary", "features of a head to rotate; all if left out", 512, 32,
                     usual_rotary),
           rare_size("ranks",
                     "ranks of a group, each with its slice: heads, kv-heads, h and shared-h are "
                     "the slice's; one GPU has all if left out",
                     GroupTable::most_ranks, 2),
           rare_size("page",
                     "keys of a page of the caches, 16 to 256, a power of two; one that is not in "
                     "memory is zeros; contiguous if left out",
                     256, 16),
           {.name = "pages",
            .help = "pages of a layer's cache; what the sequences take if left out",
            .max = 1 << 26,
            .example = 4096,
            .rare = true,
            .performance_neutral = true,
            .when_absent = usual_pages},
           rare_size(
               "kv-head",
               "elements from a head of the caches to the next one, a multiple of dim; dim if "
               "left out",
               1 << 24, 256, same_as("dim")),
           {.name = "positions",
            .help = "rows of the table of angles; 4096 if left out",
            .max = 1 << 30,
            .example = 4096,
            .rare = true,
            .performance_neutral = true,
            .when_absent = table_positions}},
      .options = option_fields(),
      .token_size = "batch",
      .rows_are_alike = false,
      .sharded_sizes = sharded_sizes(),
      .known_models = known_models};
}

/// A size that the problem's mixer does not have stands for no value where it is left out.
OpFacts with_sizes_of_mixers(OpFacts facts) {
  for (SizeField& field : facts.sizes)
    if (field.when_absent)
      field.when_absent = [name = field.name, usual = std::move(field.when_absent)](
                              const Problem& problem) -> std::optional<std::int64_t> {
        if (!is_field_of_mixer(problem, name)) return std::nullopt;
        return usual(problem);
      };
  return facts;
}

class LayerOp final : public DescribedOp {
 public:
  LayerOp() : DescribedOp(with_sizes_of_mixers(facts())) {}

  std::string contradiction(const Problem& problem) const override {
    if (auto reason = contradiction_of_mixer(problem); !reason.empty()) return reason;
    for (const auto contradiction :
         {contradiction_of_halves, contradiction_of_squares, contradiction_of_gate_scale})
      if (auto reason = contradiction(problem); !reason.empty()) return reason;
    if (problem.options.contains("link") && !problem.sizes.contains("ranks"))
      return "link=" + problem.option("link") + " without ranks: give the ranks of the group";
    const bool layer_norm = problem.has("norm", "layer");
    if (layer_norm && problem.options.contains("convention"))
      return "convention=" + problem.option("convention") + " is of norm=rms";
    const bool scales = problem.options.contains("residual-scale");
    if (scales && problem.options.contains("post-norms"))
      return fmt::format("residual-scale={} with post-norms={}: a norm takes a factor away again",
                         problem.option("residual-scale"), problem.option("post-norms"));
    if (scales && problem.has("shared-gate", "yes"))
      return fmt::format("residual-scale={} with shared-gate=yes: that network has no factor",
                         problem.option("residual-scale"));
    const bool post_norms = problem.options.contains("post-norms");
    if (layer_norm && post_norms)
      return fmt::format(
          "post-norms={} is of norm=rms: there is no layer normalisation with a residual behind it",
          problem.option("post-norms"));
    if (auto reason = contradiction_of_experts(problem); !reason.empty()) return reason;
    if (problem.options.contains("block") && post_norms)
      return fmt::format("block={} with post-norms={}: both add to one residual",
                         problem.option("block"), problem.option("post-norms"));
    if (auto reason = quantise_contradiction(problem); !reason.empty()) return reason;
    const char* const format = packed_format(problem).packed ? "weights"
                               : quantises(problem)          ? "quantise"
                                                             : nullptr;
    if (!format && has_dense_attention(problem))
      return "attn-weights=dense is of packed weights and quantise: give weights=" +
             packed_names() + ", or quantise=token or block, too";
    if (format && !has_dense_attention(problem) && problem.has("qkv-weights", "grouped"))
      return fmt::format("qkv-weights=grouped with {}={}: its rows are those of q, of k and of v",
                         format, problem.option(format));
    if (auto reason = contradiction_of_parts(problem, parts_of); !reason.empty()) return reason;
    const auto behind = mixer_of(problem).contradiction_of_parts;
    return behind == nullptr ? "" : behind(problem);
  }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return *tensors_.of(problem, [&] { return tensors_of(problem); });
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    return *stages_.of(problem, [&] { return stages_of(problem); });
  }

  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    const auto parts = parts_of(problem);
    std::vector<std::pair<const OpPart*, std::size_t>> stages;
    for (const OpPart& part : parts)
      for (std::size_t i = 0; i < part.op->stages(part.problem).size(); ++i)
        stages.emplace_back(&part, i);
    const auto [part, own] = stages.at(stage % stages.size());
    const std::int64_t layers = size_or(problem, "layers", 0);
    const auto at = static_cast<std::int64_t>(stage / stages.size());
    reference_of_part(*part, own, tensors, parallel, [&, part = part](const std::string& name) {
      const std::string& whole = part->tensor(name);
      return layers == 0 ? whole : name_in_all(whole, at, layers);
    });
  }

  std::vector<OpPart> parts(const Problem& problem) const override { return parts_of(problem); }

  std::optional<Repetition> repetition(const Problem& problem) const override {
    if (!problem.sizes.contains("layers")) return std::nullopt;
    return *repetitions_.of(problem, [&] { return repetition_of(problem); });
  }

  std::vector<const Family*> families() const override {
    static const auto families = [] {
      std::deque<PartFamily> all;
      for (const PartKind& kind : part_kinds())
        for (const Family* family : kind.op().families())
          if (has_stages(kind, *family))
            all.emplace_back(layer_op, kind.name, *family,
                             [](const Family&, const Problem&, const DeviceFacts& facts,
                                Program& program) { launch_programmatically(program, facts); });
      return all;
    }();
    // Untuned a norm is a kernel of its own: behind another it takes about a microsecond, no more
    // than it takes each block of a product to find the deviations, and only a search can tell.
    std::vector<const Family*> list = persistent_layers();
    for (const Family* family : sums()) list.push_back(family);
    for (const PartFamily& family : families) list.push_back(&family);
    for (const Family* family : normed_products()) list.push_back(family);
    return list;
  }

 private:
  static std::vector<StageSpec> stages_of(const Problem& problem) {
    const auto one = stages_of_parts(parts_of(problem));
    if (!problem.sizes.contains("layers")) return one;
    const std::int64_t layers = problem.size("layers");
    std::vector<StageSpec> stages;
    for (std::int64_t at = 0; at < layers; ++at)
      for (StageSpec stage : one) {
        stage.name = fmt::format("layers.{}.{}", at, stage.name);
        for (auto* names : {&stage.inputs, &stage.outputs})
          for (std::string& name : *names) name = name_in_all(name, at, layers);
        stages.push_back(std::move(stage));
      }
    return stages;
  }

  static Repetition repetition_of(const Problem& problem) {
    const std::int64_t layers = problem.size("layers");
    Repetition repetition{one_layer(problem), {}};
    std::map<std::string, std::size_t> all;
    for (const TensorSpec& tensor : layer_op().tensors(problem))
      all.emplace(tensor.name, all.size());
    const auto one = layer_op().tensors(repetition.one);
    for (std::int64_t at = 0; at < layers; ++at) {
      std::vector<std::size_t> places;
      for (const TensorSpec& tensor : one)
        places.push_back(all.at(name_in_all(tensor.name, at, layers)));
      repetition.places.push_back(std::move(places));
    }
    return repetition;
  }

  mutable OfLastProblems<std::vector<TensorSpec>> tensors_;
  mutable OfLastProblems<std::vector<StageSpec>> stages_;
  mutable OfLastProblems<Repetition> repetitions_;
};

}  // namespace

bool is_shared(const std::string& name) {
  return input_order().place(name) < static_cast<std::ptrdiff_t>(input_order().shared);
}

bool has_cache(const Problem& problem) {
  return mixer_needs(problem, "cache");
}

bool has_states(const Problem& problem) {
  return mixer_needs(problem, "width");
}

}  // namespace fftune::layer

const fftune::Op& fftune::layer_op() {
  static const layer::LayerOp op;
  return op;
}
