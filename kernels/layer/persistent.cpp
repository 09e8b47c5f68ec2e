// The families of layer/persistent.cu: which layers they serve, what they choose untuned, and their
// launches.
#include "kernels/layer/persistent_space.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device/group_layout.hpp"
#include "kernels/all_reduce/all_reduce.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/least_cost.hpp"
#include "kernels/gemm/decode/stream_shape.cuh"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "kernels/layer/mixer.hpp"
#include "kernels/layer/persistent_parameters.hpp"
#include "registry/part_family.hpp"

namespace fftune::layer {
namespace {

/// Sequences for which the kernel takes less time than the parts at any length, and those for which
/// it does where their inputs of a norm have most_preferred_inputs elements together, and their
/// keys are at most as many as were timed.
constexpr std::int64_t most_preferred = 2, most_preferred_if_short = 4;
constexpr std::int64_t most_preferred_inputs = 8192, most_preferred_keys = 2048;
/// New tokens of one sequence: 16 layers of Llama-3.2-1B take 847 us with three and 908 with five
/// on an H100, and their parts 1,029 and 937; with eight it is 977 and 969.
constexpr std::int64_t most_preferred_in_sequence = 5;
/// Heads of queries that share one of keys in dense layers on one GPU: with 7 the parts are 6%
/// faster (one sequence of Qwen2.5-7B on an H200), with 16 17% (GLM-4-9B), and with 4 slower.
constexpr double most_preferred_queries = 6;
/// Features between up and down of one token's experts, up to which the kernel has been timed.
constexpr std::int64_t most_preferred_hidden = 40960;

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
    if (const Mixer& mixer = mixer_of(problem); &mixer != &attention_mixer())
      return fmt::format("mixer={}: the kernel has attention", mixer.name);
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
      return fmt::format("{} tokens of {} features exceed what packets carry", tokens,
                         problem.size("d"));
    if (tokens > most_stream_columns)
      return fmt::format("batch={}, s={}: {} tokens exceed the {} columns of an MMA",
                         problem.size("batch"), s, tokens, most_stream_columns);
    if (auto reason = unknown_option(problem, experts_)) return reason;
    const Layer layer(problem);
    const qkv::Layer& heads = layer.heads;
    if (heads.grouped || heads.norm_last || heads.norm == qkv::HeadNorm::rows ||
        heads.norm == qkv::HeadNorm::centred)
      return "the kernel needs the rows of q, k and v one after the other, and head norms in front "
             "of RoPE";
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
      return std::tuple(c.held != usual.held_of(c.chunk), packs && c.chunk != 512,
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
    // Fewer heads of keys are shared among more blocks, whose parts of the outputs of all heads of
    // queries are added up. With 4 heads of queries for one of keys a layer of 8B parameters waits
    // 13 us, with the 7 of Qwen2.5-7B 26, and with the 16 of GLM-4-9B 48.
    constexpr double of_queries = 3e-6;
    const double inputs = static_cast<double>(config.at("input_kb")) / usual.input_kb;
    const double unusual =
        of_stage *
            static_cast<double>(std::abs(config.get("held") - usual.held_of(config.get("chunk")))) +
        (has_many_tokens(problem) ? of_doubled_input * std::max(0.0, std::log2(inputs)) : 0);
    const double of_layer =
        (has_few_tokens(problem) ? waits : waits_of_many) + unusual +
        (experts_ ? waits_of_router : 0) + (network_ == Network::slices ? waits_of_peers : 0) +
        off * 1e-6 +
        (network_ == Network::dense ? of_queries * std::max(0.0, queries_of_key(problem) - 4) : 0);
    return cost_of(layer_op(), problem).bytes / bandwidth +
           static_cast<double>(size_or(problem, "layers", 1)) * of_layer;
  }
  bool covers_repetition() const override { return true; }
  bool serves_tokens(bool packs_head) const {
    return network_ != Network::slices && !post_norms_ && !(packs_head && experts_);
  }
  bool is_preferred(const Problem& problem, const DeviceFacts&) const override {
    return has_few_tokens(problem) &&
           (network_ != Network::dense || queries_of_key(problem) <= most_preferred_queries);
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    if (const auto repetition = layer_op().repetition(problem))
      return program_of(repetition->one, repetition->places, nullptr, facts, config);
    std::vector<std::size_t> places(layer_op().tensors(problem).size());
    std::iota(places.begin(), places.end(), std::size_t{0});
    return program_of(problem, {places}, nullptr, facts, config);
  }

  /// `step`: what is around the layers; or null.
  static Program program_of(const Problem& one, const std::vector<std::vector<std::size_t>>& places,
                            const DecodeStep* step, const DeviceFacts& facts,
                            const Config& config) {
    const Layer layer(one);
    persistent_config persistent = Draft(form_of(one, layer, facts), facts, config).whole();
    if (step != nullptr) step->set_form(persistent);
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
      const auto begin = places.begin() + static_cast<std::ptrdiff_t>(first);
      const LaunchedLayers layers{{begin, begin + static_cast<std::ptrdiff_t>(count)},
                                  first == 0,
                                  first + count == places.size()};
      if (step != nullptr && layers.last)
        program.scratch.back().bytes += static_cast<std::size_t>(persistent.parts_bytes());
      launch.parameters = parameters_of(program, one, layer, layers, step, expression);
      program.steps.emplace_back(std::move(launch));
    }
    return program;
  }

 private:
  /// The parameters that measurement found to be the fastest.
  struct Usual {
    int held, input_kb, in_flight, attention_in_flight, ahead_kb;
    /// Larger stages take more registers: 4 layers of Llama-3.1-8B, whose stages have 1,024
    /// elements, take 609 us with two and 623 with four, which spill.
    int held_of(std::int64_t chunk) const { return held > 2 && chunk > 512 ? 2 : held; }
  };
  /// So few that one launch is faster than the parts with 4 heads of queries for one of keys.
  bool has_few_tokens(const Problem& problem) const {
    const std::int64_t batch = problem.size("batch"), s = size_or(problem, "s", 1);
    if (s > 1)
      return network_ == Network::dense && packing_ == Packing::none && !post_norms_ &&
             batch == 1 && s <= most_preferred_in_sequence;
    if (post_norms_) return batch == 1;
    if (packing_ != Packing::none && !experts_) return batch <= most_preferred;
    const bool is_short = batch <= most_preferred_if_short &&
                          batch * problem.size("d") <= most_preferred_inputs &&
                          batch * problem.size("cache") <= most_preferred_keys;
    if (!experts_) return batch <= most_preferred || is_short;
    const std::int64_t hidden = problem.size("h") * experts_of_token(problem);
    return hidden <= most_preferred_hidden &&
           (batch == 1 || (is_short && packing_ == Packing::none));
  }
  static double queries_of_key(const Problem& problem) {
    return static_cast<double>(problem.size("heads")) /
           static_cast<double>(size_or(problem, "kv-heads", problem.size("heads")));
  }
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
    // In two runs 8 layers of Llama-3.1-8B in int4 take 406 and 400 us so, and 412 and 403 with 36.
    const bool is_packed_dense = of_4_bits && !experts_;
    const int input_kb = has_many_tokens(problem) || is_packed_dense ? 16 : 36;
    // 8 layers of Llama-3.1-8B in int4 take 423 us with two copies in flight, 433 with three and
    // 439 with four; 16 of Llama-3.2-1B in bf16 take 777, 746 and 739. Beside packed experts the
    // output product is dense, four times as many bytes as a packed one, and is copied while
    // attention goes on: 4 layers of gpt-oss take 247 us with two copies always, and 254 with one.
    const bool is_dense_between = of_4_bits && !packs_attention(problem);
    // 64 KB in L2 make four sequences 789 us instead of 827, and 6 layers of Qwen3-30B-A3B 315
    // instead of 323. One token of dense layers and packed weights are no faster; a decode step of
    // Llama-3.2-1B takes 913 us with them, and 892 without. Slices of ranks were not timed.
    const bool looks_ahead =
        !format.packed && network_ != Network::slices && (experts_ || has_many_tokens(problem));
    // Four sequences take 770 us with three, and 794 with four; one takes 746 and 739. Five tokens
    // of a sequence take 899 with two, and 921 with three.
    const std::int64_t tokens = problem.size("batch") * size_or(problem, "s", 1);
    const bool has_few_copies =
        network_ == Network::dense && packing_ == Packing::none && tokens > 2;
    return {.held = held,
            .input_kb = input_kb,
            .in_flight = of_4_bits                                        ? 2
                         : has_few_copies && size_or(problem, "s", 1) > 4 ? 2
                         : has_few_copies                                 ? 3
                                                                          : 4,
            .attention_in_flight = is_dense_between ? 2 : 1,
            .ahead_kb = looks_ahead ? 64 : 0};
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
    {"persistent_shared", "the same with a mixture of experts and a shared MLP", Network::shared},
    {"persistent_weighted", "the same where a gate weights the shared MLP", Network::weighted},
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
     "all layers in one launch, with packed weights, experts and a shared MLP", Network::shared,
     Packing::all},
    {"persistent_packed_weighted", "the same where a gate weights the shared MLP",
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
                           const DecodeStep& step, const DeviceFacts& facts, const Config& config) {
  return PersistentLayers::program_of(unrepeated(layer_op(), layers), places, &step, facts, config);
}

}  // namespace fftune::layer
