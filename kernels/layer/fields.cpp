#include "kernels/layer/fields.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/group_layout.hpp"
#include "kernels/causal_conv1d/causal_conv1d.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/cache_format.hpp"
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

namespace fftune::layer {
namespace {

constexpr std::int64_t most_layers = 256;

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

}  // namespace

// The baseline that a user would take is another library's kernels: bench/ compares with PyTorch's.
OpFacts facts() {
  return with_sizes_of_mixers(
      {.name = "layer",
       .summary =
           "transformer layers: norm, qkv into the cache, attention over it, output product, norm, "
           "feed-forward network or mixture of experts",
       .passes = {"fwd"},
       .sizes =
           {token_count("batch", "sequences", {1, 16, 64}, {1, 4}, 65536, 4),
            {.name = "d", .help = "features of a token", .example = 1024},
            {.name = "h",
             .help = "intermediate size of the feed-forward network, or of an expert",
             .example = 2048,
             .is_needed = has_network},
            size_of_mixers({.name = "heads",
                            .help = "heads of q; with mixer=conv heads and dim make its channels",
                            .max = 1024,
                            .example = 16}),
            size_of_mixers(
                {.name = "dim", .help = "features of a head", .max = 512, .example = 64}),
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
            rare_size("rank", "mixer=mla: features of the latent of keys and values",
                      mla::most_rank, 512),
            rare_size("q-rank", "mixer=mla: those of the queries' latent; none if left out",
                      1 << 24, 1536),
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
            rare_size("ssm-heads",
                      "mixer=attention-ssd: heads of ssd; heads are those of attention", 1024, 24),
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
       .known_models = known_models});
}

}  // namespace fftune::layer
