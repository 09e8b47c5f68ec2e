#include "kernels/layer/persistent_space.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/common/struct_text.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "registry/part_family.hpp"

namespace fftune::layer {
namespace {

constexpr std::int64_t reserved_shared_bytes = 1024;  // by the driver, for each block
constexpr int most_stages = 32;
constexpr std::int64_t most_experts = 256;

}  // namespace

Network network_of(const Problem& problem) {
  if (problem.sizes.contains("ranks")) return Network::slices;
  if (!has_experts(problem)) return Network::dense;
  if (!problem.sizes.contains("shared-h")) return Network::experts;
  return problem.has("shared-gate", "yes") ? Network::weighted : Network::shared;
}

const char* words_of(Network network) {
  switch (network) {
    case Network::dense:
      return "no experts";
    case Network::experts:
      return "experts, without a shared MLP";
    case Network::shared:
      return "experts and a shared MLP without a gate";
    case Network::weighted:
      return "experts and a shared MLP with a gate";
    case Network::slices:
      return "slices of a group's ranks";
  }
  return "";
}

Packing packing_of(const Problem& problem) {
  if (!packed_format(problem).packed) return Packing::none;
  return packs_attention(problem) ? Packing::all : Packing::network;
}

const char* words_of(Packing packing) {
  switch (packing) {
    case Packing::none:
      return "dense weights";
    case Packing::network:
      return "packed weights in the feed-forward network alone";
    case Packing::all:
      return "packed weights";
  }
  return "";
}

Layer::Layer(const Problem& problem)
    : activation(parse_activation(option_or(problem, "act", "silu"))),
      cache(problem.size("cache")) {
  const auto parts = parts_of(problem);
  heads = qkv::layer_of(part_named(parts, "qkv")->problem);
  attention = attention::layer_of(part_named(parts, "attention")->problem);
  norm = norm::layer_of(part_named(parts, "attn_norm")->problem);
  if (const OpPart* route = part_named(parts, "route"))
    router = moe_route::router_of(route->problem);
}

persistent_config form_of(const Problem& problem, const Layer& layer, const DeviceFacts& facts) {
  const std::int64_t s = size_or(problem, "s", 1);
  const qkv::Layer& heads = layer.heads;
  const auto extent = [&](const char* name) { return static_cast<int>(size_or(problem, name, 0)); };
  const persistent_model model{.tokens = static_cast<int>(problem.size("batch") * s),
                               .per_sequence = static_cast<int>(s),
                               .d = extent("d"),
                               .h = extent("h"),
                               .heads = static_cast<int>(heads.heads),
                               .kv_heads = static_cast<int>(heads.kv_heads),
                               .dim = static_cast<int>(heads.dim),
                               .rotary = static_cast<int>(heads.rotates() ? heads.rotary : 0),
                               .window = extent("window"),
                               .page = extent("page"),
                               .kv_head = static_cast<int>(heads.cache_head),
                               .ranks = extent("ranks"),
                               .bias = heads.bias,
                               .head_norms = heads.normalises(),
                               .rotates = heads.rotates(),
                               .wide_slots = heads.wide_slots,
                               .packed_qkv = heads.packed,
                               .sinks = problem.has("sinks", "yes"),
                               .out_bias = problem.has("out-bias", "yes"),
                               .caps_scores = layer.attention.softcap > 0,
                               .scales_residual = problem.has("residual-scale", "yes"),
                               .post_norms = problem.has("post-norms", "yes")};
  persistent_config form(model);
  form.blocks = facts.multiprocessors;
  form.packs_attention = packs_attention(problem);
  form.packs_network = packed_format(problem).packed;
  if (form.packs_network) form.format = packed_format(problem).form();
  if (const auto& router = layer.router) {
    form.experts = static_cast<int>(router->experts);
    form.choices = static_cast<int>(router->choices);
    form.shared = static_cast<int>(size_or(problem, "shared", 0));
    form.own = static_cast<int>(size_or(problem, "shared-h", 0) / problem.size("h"));
    form.own_gate = problem.has("shared-gate", "yes");
    form.score = static_cast<persistent_score>(router->score);
    form.renormalises = router->renormalises;
    form.router_bias = problem.has("router-bias", "yes");
    form.choice_bias = router->bias;
    form.rounds_logits = router->dtype != DType::f32;
    form.packed_gate_up = problem.has("gate-up", "halves");
    form.interleaved = problem.has("gate-up", "interleaved");
    form.expert_bias = problem.has("ffn-bias", "yes");
  }
  return form;
}

Draft::Draft(const persistent_config& form, const DeviceFacts& facts)
    : config_(form), limit_(facts.shared_bytes_per_block - reserved_shared_bytes) {}

Draft::Draft(const persistent_config& form, const DeviceFacts& facts, const Config& config)
    : Draft(form, facts) {
  config_.warps = config.get("warps");
  config_.chunk = config.get("chunk");
  config_.in_flight = config.get("in_flight");
  config_.attention_in_flight = config.get("attention_in_flight");
  config_.least_keys = config.get("least_keys");
  set_input_kb(*this, config.at("input_kb"));
  config_.head_groups = config.get("head_groups");
  config_.held = config.get("held");
  set_ahead_kb(*this, config.get("ahead_kb"));
}

void Draft::count_stages() const {
  constexpr std::int64_t alignment = 128;
  config_.stages = 0;
  const std::int64_t each = config_.stage_bytes();
  const auto fits = [&] { return config_.shared_bytes() + each + alignment <= limit_; };
  // With 16 bytes of barriers each, and two alignments, so many fit for sure.
  const std::int64_t sure = (limit_ - config_.shared_bytes() - 2 * alignment) / (each + 16);
  config_.stages = static_cast<int>(std::clamp<std::int64_t>(sure, 0, most_stages));
  while (config_.stages < most_stages && fits()) ++config_.stages;
}

std::int64_t experts_of_token(const Problem& problem) {
  return problem.size("top-k") + size_or(problem, "shared", 0) +
         size_or(problem, "shared-h", 0) / problem.size("h");
}

std::optional<std::string> unknown_option(const Problem& problem, bool experts) {
  const std::pair<const char*, const char*> usual[] = {
      {"norm", "rms"},     {"block", "serial"},    {"ffn", experts ? "moe" : "gated"},
      {"quantise", "no"},  {"output-gate", "no"},  {"cache-format", "same"},
      {"v-norm", "no"},    {"layer-scalar", "no"}, {"expert-norms", "no"},
      {"keys", "own"},     {"query-scale", "no"},  {"expert-scale", "no"},
      {"gate-scale", "no"}};
  for (const auto& [name, value] : usual)
    if (option_or(problem, name, value) != value)
      return fmt::format("{}={}: the kernel knows {} alone", name, problem.option(name), value);
  if (problem.sizes.contains("input-h"))
    return fmt::format("input-h={}: the kernel knows layers without inputs of their own",
                       problem.size("input-h"));
  if (problem.has("residual-scale", "each"))
    return "residual-scale=each: the kernel has one vector for all that is added";
  if (problem.has("act", "relu2")) return "act=relu2: the kernel has gates";
  if (problem.has("post-norms", "only"))
    return "post-norms=only: the kernel has norms in front too";
  if (!experts && problem.has("ffn-bias", "yes"))
    return "ffn-bias=yes: the kernel adds biases to experts alone";
  if (!experts) return std::nullopt;
  if (problem.has("residual-scale", "yes"))
    return "residual-scale=yes: with experts the kernel adds to the residual without a factor";
  if (problem.sizes.contains("groups"))
    return fmt::format("groups={}: the kernel has no groups of experts", problem.size("groups"));
  if (const std::int64_t own = size_or(problem, "shared-h", 0), h = problem.size("h"); own % h != 0)
    return fmt::format("shared-h={}: the kernel takes a multiple of h={}", own, h);
  if (problem.size("experts") > most_experts)
    return fmt::format("experts={} exceeds {}, for a lane's registers", problem.size("experts"),
                       most_experts);
  if (const std::int64_t choices = experts_of_token(problem); choices > 32)
    return fmt::format("{} experts of a token exceed the 32 lanes of a warp", choices);
  return std::nullopt;
}

namespace {

std::string text_of(const persistent_model& c) {
  return StructText("persistent_model", "tokens", c.tokens, "per_sequence", c.per_sequence, "d",
                    c.d, "h", c.h, "heads", c.heads, "kv_heads", c.kv_heads, "dim", c.dim, "rotary",
                    c.rotary, "window", c.window, "page", c.page, "kv_head", c.kv_head, "ranks",
                    c.ranks, "bias", c.bias, "head_norms", c.head_norms, "rotates", c.rotates,
                    "wide_slots", c.wide_slots, "packed_qkv", c.packed_qkv)
      .flags("sinks", c.sinks, "out_bias", c.out_bias, "caps_scores", c.caps_scores,
             "scales_residual", c.scales_residual, "post_norms", c.post_norms);
}

std::string text_of(const persistent_mixture& c) {
  if (!c.has_experts()) return "{}";
  return StructText("persistent_mixture", "experts", c.experts, "choices", c.choices, "shared",
                    c.shared, "own", c.own, "own_gate", c.own_gate, "score",
                    fmt::format("fftune::persistent_score({})", static_cast<int>(c.score)),
                    "renormalises", c.renormalises, "router_bias", c.router_bias, "choice_bias",
                    c.choice_bias, "rounds_logits", c.rounds_logits, "packed_gate_up",
                    c.packed_gate_up, "interleaved", c.interleaved, "expert_bias", c.expert_bias);
}

std::string text_of(const persistent_vocabulary& c) {
  if (!c.has_head()) return "{}";
  return StructText("persistent_vocabulary", "vocab", c.vocab, "draws", c.draws, "sums", c.sums,
                    "head_bias", c.head_bias, "rounds_head", c.rounds_head, "caps_head",
                    c.caps_head);
}

std::string text_of(const persistent_packing& c) {
  if (!c.packs() && !c.packs_head) return "{}";
  return StructText("persistent_packing", "packs_attention", c.packs_attention, "packs_network",
                    c.packs_network, "format", c.packs() ? template_argument(c.format) : "{}",
                    "packs_head", c.packs_head, "head_format",
                    c.packs_head ? template_argument(c.head_format) : "{}");
}

std::string text_of(const persistent_tuning& c) {
  return StructText("persistent_tuning", "blocks", c.blocks, "warps", c.warps, "chunk", c.chunk,
                    "stages", c.stages, "least_keys", c.least_keys, "in_flight", c.in_flight,
                    "attention_in_flight", c.attention_in_flight, "input_limit", c.input_limit,
                    "head_groups", c.head_groups, "held", c.held, "ahead", c.ahead);
}

}  // namespace

std::string text_of(const persistent_config& c) {
  return fmt::format("fftune::persistent_config({}, {}, {}, {}, {})",
                     text_of(static_cast<const persistent_model&>(c)),
                     text_of(static_cast<const persistent_mixture&>(c)),
                     text_of(static_cast<const persistent_vocabulary&>(c)),
                     text_of(static_cast<const persistent_packing&>(c)),
                     text_of(static_cast<const persistent_tuning&>(c)));
}

TypedSpace<Draft> drafts_of(const persistent_config& form, const DeviceFacts& facts) {
  using C = persistent_config;
  TypedSpace<Draft> space{Draft(form, facts)};
  space.parameter("warps", "warps that multiply", Draft::set<&C::warps>, {8, 16})
      .parameter("chunk", "elements of k of a stage of 16 rows of weights", Draft::set<&C::chunk>,
                 {256, 512, 768, 1024})
      .parameter("in_flight",
                 "stages that are copied at a time: polling loads of other blocks queue behind "
                 "them",
                 Draft::set_apart<&C::in_flight>, {2, 3, 4, 6, 8})
      .parameter("attention_in_flight", "the same, while attention goes on",
                 Draft::set_apart<&C::attention_in_flight>, {1, 2, 4})
      .parameter("least_keys", "keys at least that a block has of a sequence",
                 Draft::set_apart<&C::least_keys>, {16, 32, 64})
      .parameter("input_kb", "KB of activations in shared memory, about", Draft::set_input_kb,
                 {16, 24, 36, 72})
      .parameter("head_groups", "parts of the heads, which blocks share in attention",
                 Draft::set<&C::head_groups>, {1, 2, 4})
      .when_absent(1)
      .parameter("held", "stages of a product that wait in registers for its activations",
                 Draft::set_apart<&C::held>, {0, 2, 4, 6})
      .when_absent(0)
      .parameter("ahead_kb",
                 "KB of later weights, of each of two, that L2 takes while the stream waits",
                 Draft::set_ahead_kb, {0, 32, 64, 128})
      .when_absent(0);
  const auto limit = [&](std::string reason, const TypedSpace<Draft>::Names& reads, auto holds) {
    space.constraint(std::move(reason), reads,
                     [holds](const Draft& draft) { return holds(draft.sizes()); });
  };
  limit("ahead_kb above 0 excludes packed weights of attention beside experts", {"ahead_kb"},
        [](const C& c) { return c.ahead == 0 || c.can_look_ahead(); });
  limit("head_groups must divide the heads of k, and the heads of a group must divide the warps",
        {"warps", "head_groups"}, [](const C& c) {
          return c.kv_heads % c.head_groups == 0 && c.warps % c.own_kv_heads() == 0;
        });
  limit("chunk must be a multiple of 32 * warps, so that each warp has a part of every stage's k",
        {"warps", "chunk"}, [](const C& c) { return c.chunk % (32 * c.warps) == 0; });
  limit("16 keys of a group's heads must fit in a stage", {"chunk", "head_groups"},
        [](const C& c) { return c.own_kv_rows() <= c.chunk; });
  space.constraint("at least 4 stages must fit in shared memory beside the activations",
                   {"warps", "chunk", "input_kb", "head_groups"},
                   [](const Draft& draft) { return draft.whole().stages >= 4; });
  limit("the outputs of a warp's queries must fit in registers", {"warps"},
        [](const C& c) { return c.fits_queries(); });
  limit("attention_in_flight is at most in_flight", {"attention_in_flight", "in_flight"},
        [](const C& c) { return c.attention_in_flight <= c.in_flight; });
  space.constraint("in_flight is at most the number of stages",
                   {"warps", "chunk", "in_flight", "input_kb", "head_groups"},
                   [](const Draft& draft) {
                     const C& c = draft.whole();
                     return c.in_flight <= c.stages;
                   });
  limit("an MMA thread has at most one element of the residual stream", {"warps"},
        [](const C& c) { return c.most_residual_rows() * c.tokens <= c.consumers(); });
  limit("an MMA thread combines at most one unit of attention", {"warps"},
        [](const C& c) { return c.unit_threads() <= c.consumers(); });
  return space;
}

}  // namespace fftune::layer
