// The host side of layer/persistent.cu: which layers it computes, its space, and its launches.
#include "core/dtype.hpp"  // its names come before those of device headers

#include "kernels/layer/persistent.cuh"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <numbers>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device/group_layout.hpp"
#include "kernels/all_reduce/all_reduce.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/least_cost.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "kernels/layer/layer.hpp"
#include "kernels/moe_route/moe_route.hpp"
#include "kernels/norm/norm.hpp"
#include "kernels/qkv/qkv.hpp"
#include "registry/part_family.hpp"

namespace fftune::layer {
namespace {

constexpr std::int64_t reserved_shared_bytes = 1024;  // by the driver, for each block
constexpr int most_stages = 32;
constexpr std::int64_t most_experts = 256;
/// Sequences for which the kernel takes less time than the parts at any length, and those for which
/// it does where their inputs of a norm have most_preferred_inputs elements together, and their
/// keys are at most as many as were timed.
constexpr std::int64_t most_preferred = 2, most_preferred_if_short = 4;
constexpr std::int64_t most_preferred_inputs = 8192, most_preferred_keys = 2048;
/// Features between up and down of one token's experts, up to which the kernel has been timed.
constexpr std::int64_t most_preferred_hidden = 40960;

/// Where the parameters of a token, and those of the layers, begin.
constexpr std::size_t token_at = sizeof(persistent_common),
                      layers_at = token_at + sizeof(persistent_token);
static_assert(sizeof(persistent_params) ==
              layers_at + sizeof(persistent_layer_pointers) * persistent_params::most_layers);
static_assert(sizeof(persistent_packed_expert_params) ==
              layers_at + sizeof(persistent_packed_expert_layer) * persistent_params::most_layers);

/// The feed-forward network of the layers.
enum class Network {
  dense,
  experts,   // a mixture
  shared,    // and a network of all tokens beside it
  weighted,  // which a gate weights
  slices,    // a rank's of layers
};
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
      return "experts, and no network of all tokens";
    case Network::shared:
      return "experts and a network of all tokens without a gate";
    case Network::weighted:
      return "experts and a network of all tokens with a gate";
    case Network::slices:
      return "slices of a group's ranks";
  }
  return "";
}

/// Which weights of the layers are packed.
enum class Packing { none, network, all };
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

/// The layer options that the kernel reads and its configuration does not say.
struct Layer {
  qkv::Layer heads;
  attention::Layer attention;
  norm::Layer norm;
  Activation activation = Activation::silu;
  std::int64_t cache = 0;
  std::optional<moe_route::Router> router;  // of a mixture of experts

  explicit Layer(const Problem& problem)
      : activation(parse_activation(option_or(problem, "act", "silu"))),
        cache(problem.size("cache")) {
    const auto parts = parts_of(problem);
    heads = qkv::layer_of(part_named(parts, "qkv")->problem);
    attention = attention::layer_of(part_named(parts, "attention")->problem);
    norm = norm::layer_of(part_named(parts, "attn_norm")->problem);
    if (const OpPart* route = part_named(parts, "route"))
      router = moe_route::router_of(route->problem);
  }
};

/// The kernel's configuration but for what the space decides.
persistent_config form_of(const Problem& problem, const Layer& layer, const DeviceFacts& facts) {
  const std::int64_t s = size_or(problem, "s", 1);
  const qkv::Layer& heads = layer.heads;
  persistent_config form{.tokens = static_cast<int>(problem.size("batch") * s),
                         .per_sequence = static_cast<int>(s),
                         .d = static_cast<int>(problem.size("d")),
                         .h = static_cast<int>(problem.size("h")),
                         .heads = static_cast<int>(heads.heads),
                         .kv_heads = static_cast<int>(heads.kv_heads),
                         .dim = static_cast<int>(heads.dim),
                         .rotary = static_cast<int>(heads.rotates() ? heads.rotary : 0),
                         .window = static_cast<int>(size_or(problem, "window", 0)),
                         .blocks = facts.multiprocessors,
                         .bias = heads.bias,
                         .head_norms = heads.normalises(),
                         .rotates = heads.rotates(),
                         .wide_slots = heads.wide_slots,
                         .packed_qkv = heads.packed,
                         .page = static_cast<int>(size_or(problem, "page", 0)),
                         .kv_head = static_cast<int>(heads.cache_head),
                         .sinks = problem.has("sinks", "yes"),
                         .out_bias = problem.has("out-bias", "yes"),
                         .caps_scores = layer.attention.softcap > 0,
                         .scales_residual = problem.has("residual-scale", "yes"),
                         .post_norms = problem.has("post-norms", "yes"),
                         .ranks = static_cast<int>(size_or(problem, "ranks", 0)),
                         .packs_attention = packs_attention(problem),
                         .packs_network = packed_format(problem).packed};
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

/// A configuration of a form, whose stages are counted where they are asked for: as many as fit.
class Draft {
 public:
  Draft(const persistent_config& form, const DeviceFacts& facts)
      : config_(form), limit_(facts.shared_bytes_per_block - reserved_shared_bytes) {}
  Draft(const persistent_config& form, const DeviceFacts& facts, const Config& config)
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

  /// But for the stages.
  const persistent_config& sizes() const { return config_; }
  const persistent_config& whole() const {
    if (!std::exchange(counted_, true)) count_stages();
    return config_;
  }

  /// A field that shared memory does not depend on.
  template <auto field>
  static void set_apart(Draft& draft, std::int64_t value) {
    draft.config_.*field = static_cast<int>(value);
  }
  template <auto field>
  static void set(Draft& draft, std::int64_t value) {
    set_apart<field>(draft, value);
    draft.counted_ = false;
  }
  static void set_ahead_kb(Draft& draft, std::int64_t value) {
    set_apart<&persistent_config::ahead>(draft, value * 1024);
  }
  static void set_input_kb(Draft& draft, std::int64_t value) {
    set<&persistent_config::input_limit>(draft, value * 1024);
  }

 private:
  void count_stages() const {
    constexpr std::int64_t alignment = 128;
    config_.stages = 0;
    const std::int64_t each = config_.stage_bytes();
    const auto fits = [&] { return config_.shared_bytes() + each + alignment <= limit_; };
    // With 16 bytes of barriers each, and two alignments, so many fit for sure.
    const std::int64_t sure = (limit_ - config_.shared_bytes() - 2 * alignment) / (each + 16);
    config_.stages = static_cast<int>(std::clamp<std::int64_t>(sure, 0, most_stages));
    while (config_.stages < most_stages && fits()) ++config_.stages;
  }

  mutable persistent_config config_;
  std::int64_t limit_;
  mutable bool counted_ = false;
};

/// Experts of a token, and parts of a network of all tokens, which are as large.
std::int64_t experts_of_token(const Problem& problem) {
  return problem.size("top-k") + size_or(problem, "shared", 0) +
         size_or(problem, "shared-h", 0) / problem.size("h");
}

/// The first of the options that the kernel does not know.
std::optional<std::string> unknown_option(const Problem& problem, bool experts) {
  const std::pair<const char*, const char*> usual[] = {
      {"norm", "rms"}, {"block", "serial"}, {"ffn", experts ? "moe" : "gated"}, {"quantise", "no"}};
  for (const auto& [name, value] : usual)
    if (option_or(problem, name, value) != value)
      return fmt::format("{}={}: the kernel knows {} alone", name, problem.option(name), value);
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

std::string text_of(const persistent_config& c) {
  std::string mixture;
  if (c.has_experts())
    mixture = fmt::format(
        ", .experts = {}, .choices = {}, .shared = {}, .own = {}, .own_gate = {}, .score = "
        "fftune::persistent_score({}), "
        ".renormalises = {}, .router_bias = {}, .choice_bias = {}, .rounds_logits = {}, "
        ".packed_gate_up = {}, .interleaved = {}, .expert_bias = {}",
        c.experts, c.choices, c.shared, c.own, c.own_gate, static_cast<int>(c.score),
        c.renormalises, c.router_bias, c.choice_bias, c.rounds_logits, c.packed_gate_up,
        c.interleaved, c.expert_bias);
  std::string token;
  if (c.has_head())
    token = fmt::format(
        ", .vocab = {}, .draws = {}, .sums = {}, .head_bias = {}, .rounds_head = {}, .caps_head = "
        "{}",
        c.vocab, c.draws, c.sums, c.head_bias, c.rounds_head, c.caps_head);
  std::string packed;
  if (c.packs())
    packed = fmt::format(", .packs_attention = {}, .packs_network = {}, .format = {}",
                         c.packs_attention, c.packs_network, template_argument(c.format));
  if (c.packs_head)
    packed +=
        fmt::format(", .packs_head = true, .head_format = {}", template_argument(c.head_format));
  std::string rare;
  for (const auto& [name, value] : {std::pair{"caps_scores", c.caps_scores},
                                    {"scales_residual", c.scales_residual},
                                    {"post_norms", c.post_norms}})
    if (value) rare += fmt::format(", .{} = true", name);
  return fmt::format(
      "fftune::persistent_config{{.tokens = {}, .per_sequence = {}, .d = {}, .h = {}, .heads = {}, "
      ".kv_heads = {}, .dim = {}, .rotary = {}, .window = {}, .blocks = {}, .warps = {}, .chunk = "
      "{}, .stages = {}, .least_keys = {}, .in_flight = {}, .attention_in_flight = {}, "
      ".input_limit = {}, .bias = {}, .head_norms = {}, .rotates = {}, .wide_slots = {}, "
      ".packed_qkv = {}, .page = {}, .kv_head = {}, .head_groups = {}, .held = {}, .ahead = {}, "
      ".sinks = {}, "
      ".out_bias = {}{}{}{}{}}}",
      c.tokens, c.per_sequence, c.d, c.h, c.heads, c.kv_heads, c.dim, c.rotary, c.window, c.blocks,
      c.warps, c.chunk, c.stages, c.least_keys, c.in_flight, c.attention_in_flight, c.input_limit,
      c.bias, c.head_norms, c.rotates, c.wide_slots, c.packed_qkv, c.page, c.kv_head, c.head_groups,
      c.held, c.ahead, c.sinks, c.out_bias, rare + mixture, token,
      c.ranks > 0 ? fmt::format(", .ranks = {}", c.ranks) : "", packed);
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
  limit("L2 takes dense weights alone", {"ahead_kb"},
        [](const C& c) { return c.ahead == 0 || !c.packs(); });
  limit("every head of k of a group has a warp, and as many as every other",
        {"warps", "head_groups"}, [](const C& c) {
          return c.kv_heads % c.head_groups == 0 && c.warps % c.own_kv_heads() == 0;
        });
  limit("each warp has a part of every stage's k", {"warps", "chunk"},
        [](const C& c) { return c.chunk % (32 * c.warps) == 0; });
  limit("16 keys, of a group of heads, fit in a stage", {"chunk", "head_groups"},
        [](const C& c) { return c.own_kv_rows() <= c.chunk; });
  space.constraint("at least 4 stages fit in shared memory beside the activations",
                   {"warps", "chunk", "input_kb", "head_groups"},
                   [](const Draft& draft) { return draft.whole().stages >= 4; });
  limit("the outputs of a warp's queries fit in registers", {"warps"},
        [](const C& c) { return c.fits_queries(); });
  limit("no more stages are copied while attention goes on than else",
        {"attention_in_flight", "in_flight"},
        [](const C& c) { return c.attention_in_flight <= c.in_flight; });
  space.constraint("no more stages are copied at a time than there are",
                   {"warps", "chunk", "in_flight", "input_kb", "head_groups"},
                   [](const Draft& draft) {
                     const C& c = draft.whole();
                     return c.in_flight <= c.stages;
                   });
  limit("each thread has one element of the residual stream at most", {"warps"},
        [](const C& c) { return c.most_residual_rows() * c.tokens <= c.consumers(); });
  limit("each thread has a unit of attention to combine at most", {"warps"},
        [](const C& c) { return c.unit_threads() <= c.consumers(); });
  return space;
}

/// Layers with one kind of feed-forward network and of weights.
class PersistentLayers final : public Family {
 public:
  PersistentLayers(std::string_view name, std::string_view summary, Network network,
                   Packing packing = Packing::none, bool post_norms = false)
      : name_(name),
        summary_(summary),
        network_(network),
        packing_(packing),
        post_norms_(post_norms),
        experts_(network != Network::dense && network != Network::slices) {}
  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override {
    if (network_ == Network::slices)
      return {"attn_norm.forward",   "qkv.product", "attention.forward", "out.product",
              "attn_reduce.forward", "ffn.gate_up", "ffn.down",          "ffn_reduce.forward"};
    std::vector<std::string> stages;
    const auto add = [&](std::initializer_list<const char*> more) {
      stages.insert(stages.end(), more.begin(), more.end());
    };
    const auto add_network = [&](const std::string& part) {
      const bool packed = packing_ != Packing::none;
      for (const char* stage : {"expand_gate_up", "gate_up", "expand_down", "down"})
        if (packed || std::string_view(stage).find("expand") == std::string_view::npos)
          stages.push_back(part + "." + stage);
    };
    const bool packs_attention = packing_ == Packing::all;
    add({"attn_norm.forward"});
    if (packs_attention) add({"qkv.expand"});
    add({"qkv.product"});
    if (packs_attention) add({"qkv.heads"});
    add({"attention.forward"});
    if (packs_attention) add({"out.expand"});
    add({"out.product"});
    if (post_norms_) add({"attn_post_norm.forward"});
    add({"ffn_norm.forward"});
    if (!experts_) {
      add_network("ffn");
      if (post_norms_) add({"ffn_post_norm.forward"});
      return stages;
    }
    add({"router.product", "route.choose"});
    if (network_ == Network::shared) add_network("shared");
    if (network_ == Network::weighted) {
      add({"shared_router.product", "shared_route.choose", "shared_experts.route"});
      add_network("shared_experts");
      add({"shared_experts.combine"});
    }
    add({"experts.route"});
    add_network("experts");
    add({"experts.combine"});
    return stages;
  }
  std::vector<std::string> sources() const override { return {"layer/persistent.cu"}; }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (facts.kind != DeviceKind::cuda) return "the kernel needs a CUDA device";
    if (facts.compute_capability != 90) return "the kernel needs compute capability 9.0: TMA";
    if (problem.dtype != DType::bf16 && problem.dtype != DType::fp16)
      return "the kernel computes in bf16 and fp16";
    if (const Network network = network_of(problem); network != network_)
      return network == Network::slices
                 ? fmt::format("ranks={}: the kernel has the layers of one GPU",
                               problem.size("ranks"))
                 : fmt::format("the layers have {}", words_of(network));
    if (const Packing packing = packing_of(problem); packing != packing_)
      return fmt::format("the layers have {}", words_of(packing));
    if (problem.has("post-norms", "yes") != post_norms_)
      return post_norms_ ? "the layers have no norms behind their parts"
                         : "the layers have norms behind their parts";
    const bool slices = network_ == Network::slices;
    if (auto refusal = all_reduce::refuse_peers(problem, facts)) return refusal;
    if (slices && problem.size("ranks") != 2) return "it is for slices of two ranks";
    if (slices && (problem.sizes.contains("window") || problem.has("sinks", "yes") ||
                   problem.has("out-bias", "yes") || problem.has("residual-scale", "yes") ||
                   has_experts(problem)))
      return "on slices it has no windows, sinks, experts, factors of what is added to the "
             "residual, or biases behind attention";
    const std::int64_t s = size_or(problem, "s", 1), tokens = problem.size("batch") * s;
    if (slices && tokens * problem.size("d") * 4 > static_cast<std::int64_t>(most_packet_message))
      return fmt::format("{} tokens of {} features are more than go as packets", tokens,
                         problem.size("d"));
    if (tokens > most_stream_columns)
      return fmt::format("batch={}, s={}: {} tokens exceed the {} columns of an MMA",
                         problem.size("batch"), s, tokens, most_stream_columns);
    if (auto reason = unknown_option(problem, experts_)) return reason;
    const Layer layer(problem);
    const qkv::Layer& heads = layer.heads;
    if (heads.grouped || heads.norm_last || heads.norm == qkv::HeadNorm::rows ||
        heads.norm == qkv::HeadNorm::centred)
      return "the kernel has q, k and v one after the other, and normalises heads one by one, "
             "before RoPE";
    if (heads.dim != 64 && heads.dim != 128 && heads.dim != 256)
      return fmt::format("dim={}: the kernel has heads of 64, 128 and 256 features", heads.dim);
    if (heads.rotates() && (heads.rotation != head_rotation::halves || heads.rotary % 64 != 0))
      return "the kernel rotates a multiple of 64 features of a head, by halves";
    for (const std::int64_t k : {problem.size("d"), problem.size("h"), heads.heads * heads.dim})
      if (const int unit = packing_ == Packing::none ? 32 : packed_k; k % unit != 0)
        return fmt::format("a product over {} elements: a multiple of {} is needed", k, unit);
    const persistent_config form = form_of(problem, layer, facts);
    // A block that combines no features of attention might still read what others set to zero.
    std::vector<std::int64_t> rows_of_all{form.units()};
    if (packing_ == Packing::none)
      rows_of_all.insert(rows_of_all.end(),
                         {problem.size("d"), experts_ ? form.all_hidden() / 8 : form.h});
    for (const std::int64_t rows : rows_of_all)
      if (rows < facts.multiprocessors)
        return fmt::format("{} rows for {} SMs: every block needs a part of each product", rows,
                           facts.multiprocessors);
    if (!form.fits_queries())
      return fmt::format(
          "s={}: {} heads of new tokens share one of k: at most {}, for a thread's registers", s,
          s * heads.heads / heads.kv_heads, form.most_query_features / form.dim * 8);
    if (drafts_of(form, facts).is_empty())
      return "no stages of weights fit in shared memory beside the activations, or attention's "
             "outputs in registers";
    return std::nullopt;
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return drafts_of(form_of(problem, Layer(problem), facts), facts).space();
  }

  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    const bool packs = packed_format(problem).packed;
    const Usual usual = usual_of(problem);
    const auto drafts = drafts_of(form_of(problem, Layer(problem), facts), facts);
    return least_cost(drafts, name(), [packs, usual](const Draft& draft) {
      const persistent_config& c = draft.sizes();
      return std::tuple(c.held != usual.held, packs && c.chunk != 512,
                        c.per_sequence > 1 ? -c.head_groups : c.head_groups, c.warps != 8,
                        c.chunk != 512, c.chunk,
                        c.in_flight != (c.chunk > 512 ? 2 : usual.in_flight),
                        c.attention_in_flight != usual.attention_in_flight,
                        c.least_keys != (packs ? std::min(16 * c.groups(), 64) : 16),
                        c.input_limit != usual.input_kb * 1024, c.ahead != usual.ahead_kb * 1024);
    });
  }

  // Measured with layers of Llama on an H200: besides the time of its bytes a layer takes this long
  // for the waits of blocks for each other. The parts take some 20 us. A router adds a wait,
  // measured with Qwen3-30B-A3B on an H100, where the parts take 40 us.
  std::optional<double> estimate(const Problem& problem, const DeviceFacts& facts,
                                 const Config& config) const override {
    constexpr double waits = 13e-6, waits_of_many = 29e-6, waits_of_router = 4e-6,
                     waits_of_peers = 4e-6;
    const double bandwidth = 0.9 * (facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 4.8e12);
    const Usual usual = usual_of(problem);
    const double off = std::abs(std::log2(static_cast<double>(config.at("chunk")) *
                                          static_cast<double>(config.at("in_flight")) /
                                          (512.0 * usual.in_flight)));
    // 16 layers of Llama-3.2-1B take 749 us with 4 stages in registers and 773 with none, and 4
    // sequences 807 with 16 KB of activations at a time and 900 with 36 and none.
    constexpr double of_stage = 0.4e-6, of_doubled_input = 3e-6;
    const double inputs = static_cast<double>(config.at("input_kb")) / usual.input_kb;
    const double unusual =
        of_stage * static_cast<double>(std::abs(config.get("held") - usual.held)) +
        (has_many_tokens(problem) ? of_doubled_input * std::max(0.0, std::log2(inputs)) : 0);
    const double of_layer = (is_preferred(problem, facts) ? waits : waits_of_many) + unusual +
                            (experts_ ? waits_of_router : 0) +
                            (network_ == Network::slices ? waits_of_peers : 0) + off * 1e-6;
    return cost_of(layer_op(), problem).bytes / bandwidth +
           static_cast<double>(size_or(problem, "layers", 1)) * of_layer;
  }
  bool covers_repetition() const override { return true; }
  bool serves_tokens(bool packs_head) const {
    return network_ != Network::slices && !post_norms_ && !(packs_head && experts_);
  }
  bool is_preferred(const Problem& problem, const DeviceFacts&) const override {
    if (size_or(problem, "s", 1) > 1) return false;
    const std::int64_t batch = problem.size("batch");
    if (post_norms_) return batch == 1;
    if (packing_ != Packing::none && !experts_) return batch <= most_preferred;
    if (!experts_)
      return batch <= most_preferred || (batch <= most_preferred_if_short &&
                                         batch * problem.size("d") <= most_preferred_inputs &&
                                         batch * problem.size("cache") <= most_preferred_keys);
    const std::int64_t hidden = problem.size("h") * experts_of_token(problem);
    return batch == 1 && hidden <= most_preferred_hidden;
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    if (const auto repetition = layer_op().repetition(problem))
      return program_of(repetition->one, repetition->places, nullptr, facts, config);
    std::vector<std::size_t> places(layer_op().tensors(problem).size());
    std::iota(places.begin(), places.end(), std::size_t{0});
    return program_of(problem, {places}, nullptr, facts, config);
  }

  /// `token`: what is around the layers; or null.
  static Program program_of(const Problem& one, const std::vector<std::vector<std::size_t>>& places,
                            const WholeToken* token, const DeviceFacts& facts,
                            const Config& config) {
    const Layer layer(one);
    persistent_config persistent = Draft(form_of(one, layer, facts), facts, config).whole();
    if (token != nullptr) token->set_form(persistent);
    Program program;
    const std::string expression = fmt::format(
        "fftune::persistent_layer<{}, {}, {}, {}>", element_type(one.dtype), text_of(persistent),
        activation_type(layer.activation), norm::convention_type(layer.norm.convention));
    program.kernels.push_back({"layer/persistent.cu", expression});
    constexpr std::size_t most = persistent_params::most_layers;
    for (std::size_t first = 0; first < places.size(); first += most) {
      const std::size_t count = std::min(most, places.size() - first);
      const auto sets =
          std::min<std::int64_t>(persistent.copies_of_set, static_cast<std::int64_t>(count));
      program.scratch.push_back({.bytes = static_cast<std::size_t>(
                                     sets * persistent.set_bytes(static_cast<int>(layer.cache))),
                                 .zeroed = true});
      KernelLaunch launch;
      launch.grid.x = static_cast<std::uint32_t>(persistent.blocks);
      launch.block.x = static_cast<std::uint32_t>(persistent.threads());
      launch.shared_bytes = static_cast<std::uint32_t>(persistent.shared_bytes());
      launch.cooperative = true;
      launch.parameters =
          parameters_of(one, layer, program.scratch.size() - 1,
                        {places.begin() + static_cast<std::ptrdiff_t>(first),
                         places.begin() + static_cast<std::ptrdiff_t>(first + count)},
                        token != nullptr);
      if (persistent.ranks > 0)
        set_ranks(*launch.parameters, program, one, places.front(), count, expression);
      if (token != nullptr) {
        const auto add = [&](const std::vector<std::pair<std::size_t, Argument>>& fields) {
          for (const auto& [offset, value] : fields)
            launch.parameters->fields.push_back({offset, value});
        };
        add(token->state);
        if (first == 0)
          add(token->embedding);
        else
          add({{token_at + offsetof(persistent_token, embed_scale), 1.0f}});
        if (first + count == places.size()) {
          program.scratch.back().bytes += static_cast<std::size_t>(persistent.parts_bytes());
          add(token->head);
          add({{token_at + offsetof(persistent_token, chooses), std::int32_t{1}}});
        }
      }
      program.steps.emplace_back(std::move(launch));
    }
    return program;
  }

 private:
  /// The parameters that measurement found to be the fastest.
  struct Usual {
    int held, input_kb, in_flight, attention_in_flight, ahead_kb;
  };
  static bool has_many_tokens(const Problem& problem) {
    return problem.size("batch") * size_or(problem, "s", 1) > 1;
  }
  Usual usual_of(const Problem& problem) const {
    // On an H100, 8 layers of Llama-3.2-1B take 372 us with 4 stages in registers, and 387 with
    // none. For 3 layers of Qwen3-30B-A3B it is 167 and 165, and several tokens of a sequence
    // spill. 16 layers of Llama-3.1-8B in int4 take 864 us with none, and 880 with two.
    const PackedFormat format = packed_format(problem);
    const bool of_4_bits = format.packed && packed_bits(format.code) == 4;
    const int held = experts_ || of_4_bits || size_or(problem, "s", 1) > 1 ? 0
                     : format.packed || post_norms_                        ? 2
                                                                           : 4;
    // With few activations at a time there is room for more stages: 4 sequences take 432 us with 16
    // KB, and 463 with 36 (8 layers of Llama-3.2-1B on an H100).
    const int input_kb = has_many_tokens(problem) ? 16 : 36;
    // 8 layers of Llama-3.1-8B in int4 take 423 us with two copies in flight, 433 with three and
    // 439 with four; 16 of Llama-3.2-1B in bf16 take 777, 746 and 739. Beside packed experts the
    // output product is dense, four times as many bytes as a packed one, and is copied while
    // attention goes on: 4 layers of gpt-oss take 247 us with two copies always, and 254 with one.
    const bool is_dense_between = of_4_bits && !packs_attention(problem);
    // 64 KB in L2 make four sequences 789 us instead of 827, and 6 layers of Qwen3-30B-A3B 315
    // instead of 323. One token of dense layers and packed weights are no faster; a whole token of
    // Llama-3.2-1B takes 913 us with them, and 892 without. Slices of ranks were not timed.
    const bool looks_ahead =
        !format.packed && network_ != Network::slices && (experts_ || has_many_tokens(problem));
    return {.held = held,
            .input_kb = input_kb,
            .in_flight = of_4_bits ? 2 : 4,
            .attention_in_flight = is_dense_between ? 2 : 1,
            .ahead_kb = looks_ahead ? 64 : 0};
  }

  static void set_ranks(ParameterStruct& parameters, Program& program, const Problem& one,
                        const std::vector<std::size_t>& places, std::size_t layers,
                        const std::string& expression) {
    all_reduce::Form form;
    form.m = one.size("batch") * size_or(one, "s", 1);
    form.d = one.size("d");
    form.ranks = static_cast<int>(one.size("ranks"));
    form.loopback = !one.has("link", "peers");
    const TensorPlaces own(layer_op().tensors(one));
    // They are behind the common ones.
    constexpr std::size_t at = sizeof(persistent_common);
    all_reduce::set_group(
        parameters, program, form, form.loopback ? absent : places[own.at("group")],
        {at + offsetof(persistent_ranks, loopback), at + offsetof(persistent_ranks, table)});
    const auto tag = all_reduce::tag_of(one, fmt::format("{} {}", expression, layers));
    parameters.fields.push_back(
        {at + offsetof(persistent_ranks, tag), static_cast<std::int32_t>(tag)});
  }

  static ParameterStruct parameters_of(const Problem& one, const Layer& layer,
                                       std::size_t workspace,
                                       const std::vector<std::vector<std::size_t>>& places,
                                       bool whole_token) {
    const TensorPlaces own(layer_op().tensors(one));
    const bool experts = layer.router.has_value(), packs = packed_format(one).packed;
    const std::size_t common =
        one.sizes.contains("ranks") ? sizeof(persistent_rank_common) : sizeof(persistent_common);
    const std::size_t of_layer = packs && experts ? sizeof(persistent_packed_expert_layer)
                                 : packs          ? sizeof(persistent_packed_layer)
                                 : experts        ? sizeof(persistent_expert_layer)
                                                  : sizeof(persistent_layer_pointers);
    ParameterStruct parameters{
        .bytes = common + sizeof(persistent_token) + persistent_params::most_layers * of_layer,
        .fields = {}};
    const auto set = [&](std::size_t offset, Argument value) {
      parameters.fields.push_back({offset, std::move(value)});
    };
    const auto set_tensor = [&](std::size_t offset, const std::vector<std::size_t>& of,
                                const char* name) {
      if (const std::size_t at = own.at(name); at != absent) set(offset, TensorArgument{of[at]});
    };
    using Params = persistent_common;
    const auto& first = places.front();
    set_tensor(offsetof(Params, x), first, "x");
    set_tensor(offsetof(Params, y), places.back(), "y");
    if (!whole_token) {
      set_tensor(offsetof(Params, positions), first, "positions");
      set_tensor(offsetof(Params, slots), first, "slots");
      set_tensor(offsetof(Params, lengths), first, "lengths");
    }
    if (layer.heads.table) set_tensor(offsetof(Params, angles), first, "angles");
    set_tensor(offsetof(Params, pages), first, "pages");
    set(offsetof(Params, cache_rows), layer.heads.cache_rows);
    set(offsetof(Params, page_count), static_cast<std::int32_t>(layer.attention.pages));
    set(offsetof(Params, workspace), ScratchArgument{workspace});
    set(offsetof(Params, layers), static_cast<std::int32_t>(places.size()));
    set(offsetof(Params, cache), static_cast<std::int32_t>(layer.cache));
    set(offsetof(Params, table_rows), static_cast<std::int32_t>(layer.heads.positions));
    set(offsetof(Params, epsilon), layer.norm.eps);
    set(offsetof(Params, norm_offset), static_cast<float>(layer.heads.norm_offset));
    const float cap = layer.attention.softcap;
    set(offsetof(Params, scale),
        (cap > 0 ? cap : layer.attention.scale) * std::numbers::log2e_v<float>);
    if (cap > 0) set(offsetof(Params, inner_scale), layer.attention.scale / cap);
    const auto turns = qkv::turns_of(part_named(parts_of(one), "qkv")->problem);
    set(offsetof(Params, angle_scale), turns.scale);
    if (experts) set(offsetof(Params, route_scale), layer.router->scale);
    if (!turns.frequencies.empty())
      set(offsetof(Params, frequencies), ArrayArgument{turns.frequencies});
    for (std::size_t i = 0; i < places.size(); ++i) {
      using Pointers = persistent_layer_pointers;
      const std::size_t at = common + sizeof(persistent_token) + i * of_layer;
      const auto set_own = [&](std::size_t offset, const char* name) {
        set_tensor(at + offset, places[i], name);
      };
      set_own(offsetof(Pointers, attn_norm), "attn_norm");
      set_own(offsetof(Pointers, ffn_norm), "ffn_norm");
      set_own(offsetof(Pointers, attn_post_norm), "attn_post_norm");
      set_own(offsetof(Pointers, ffn_post_norm), "ffn_post_norm");
      if (layer.heads.packed) {
        set_own(offsetof(Pointers, qkv), "w_qkv");
        set_own(offsetof(Pointers, bias), "b_qkv");
      } else {
        const char* const names[][2] = {{"w_q", "b_q"}, {"w_k", "b_k"}, {"w_v", "b_v"}};
        for (std::size_t part = 0; part < 3; ++part) {
          set_own(offsetof(Pointers, qkv) + part * sizeof(void*), names[part][0]);
          set_own(offsetof(Pointers, bias) + part * sizeof(void*), names[part][1]);
        }
      }
      set_own(offsetof(Pointers, head_norms), "q_norm");
      set_own(offsetof(Pointers, head_norms) + sizeof(void*), "k_norm");
      set_own(offsetof(Pointers, out), "w_o");
      set_own(offsetof(Pointers, out_bias), "b_o");
      set_own(offsetof(Pointers, sinks), "sinks");
      set_own(offsetof(Pointers, residual_scale), "residual_scale");
      if (experts) {
        const auto set_router = [&](std::size_t offset, const char* name) {
          set_own(offsetof(persistent_expert_layer, router) + offset, name);
        };
        set_router(offsetof(persistent_router_pointers, weights), "w_router");
        set_router(offsetof(persistent_router_pointers, bias), "b_router");
        set_router(offsetof(persistent_router_pointers, choice_bias), "choice_bias");
        set_router(offsetof(persistent_router_pointers, gate_bias), "b_gate");
        set_router(offsetof(persistent_router_pointers, gate_bias), "b_gate_up");
        set_router(offsetof(persistent_router_pointers, up_bias), "b_up");
        set_router(offsetof(persistent_router_pointers, down_bias), "b_down");
        set_router(offsetof(persistent_router_pointers, own_gate), "w_shared_gate");
        set_router(offsetof(persistent_router_pointers, own_up), "w_shared_up");
        set_router(offsetof(persistent_router_pointers, own_down), "w_shared_down");
        set_router(offsetof(persistent_router_pointers, own_weight), "w_shared_router");
        set_own(offsetof(Pointers, gate), "w_gate_up");
      }
      set_own(offsetof(Pointers, gate), "w_gate");
      set_own(offsetof(Pointers, up), "w_up");
      set_own(offsetof(Pointers, down), "w_down");
      set_own(offsetof(Pointers, keys), "k_cache");
      set_own(offsetof(Pointers, values), "v_cache");
      if (!packs) continue;
      using Packed = persistent_packed_pointers;
      const std::size_t packed = experts ? offsetof(persistent_packed_expert_layer, packed)
                                         : offsetof(persistent_packed_layer, packed);
      constexpr const char* names[] = {"w_qkv",  "w_o",           "w_gate",      "w_up",
                                       "w_down", "w_shared_gate", "w_shared_up", "w_shared_down"};
      static_assert(std::size(names) == Packed::count);
      for (std::size_t part = 0; part < std::size(names); ++part) {
        const std::string name = names[part];
        const std::size_t offset = packed + part * sizeof(void*);
        set_own(offset + offsetof(Packed, scales), (name + "_scale").c_str());
        set_own(offset + offsetof(Packed, zeros), (name + "_zero").c_str());
      }
    }
    return parameters;
  }

  std::string_view name_, summary_;
  Network network_;
  Packing packing_;
  bool post_norms_;
  bool experts_;
};

}  // namespace

namespace {

const PersistentLayers families[] = {
    {"persistent",
     "all layers in one launch, for up to 8 tokens: weights stream through shared memory without a "
     "pause",
     Network::dense},
    {"persistent_experts", "the same with a mixture of experts, the router among it",
     Network::experts},
    {"persistent_shared", "the same with a mixture of experts and a network of all tokens",
     Network::shared},
    {"persistent_weighted", "the same where a gate weights the network of all tokens",
     Network::weighted},
    {"persistent_ranks", "all layers on a rank's slice, with the sums over two ranks among them",
     Network::slices},
    {"persistent_post_norms", "all layers in one launch, with norms behind their parts",
     Network::dense, Packing::none, true},
    {"persistent_packed", "all layers in one launch, with packed weights", Network::dense,
     Packing::all},
    {"persistent_packed_post_norms", "the same with norms behind their parts", Network::dense,
     Packing::all, true},
    {"persistent_packed_ffn",
     "the same where the weights of the feed-forward network alone are packed", Network::dense,
     Packing::network},
    {"persistent_packed_experts", "all layers in one launch, with packed weights and experts",
     Network::experts, Packing::all},
    {"persistent_packed_ffn_experts", "the same where the weights of the experts alone are packed",
     Network::experts, Packing::network},
    {"persistent_packed_shared",
     "all layers in one launch, with packed weights, experts and a network of all tokens",
     Network::shared, Packing::all},
    {"persistent_packed_weighted", "the same where a gate weights the network of all tokens",
     Network::weighted, Packing::all}};

}  // namespace

std::vector<const Family*> persistent_layers() {
  std::vector<const Family*> list;
  for (const Family& family : families) list.push_back(&family);
  return list;
}

std::vector<const Family*> layers_of_tokens(bool packs_head) {
  std::vector<const Family*> list;
  for (const PersistentLayers& family : families)
    if (family.serves_tokens(packs_head)) list.push_back(&family);
  return list;
}

Program persistent_program(const Problem& layers,
                           const std::vector<std::vector<std::size_t>>& places,
                           const WholeToken& token, const DeviceFacts& facts,
                           const Config& config) {
  return PersistentLayers::program_of(unrepeated(layer_op(), layers), places, &token, facts,
                                      config);
}

}  // namespace fftune::layer
