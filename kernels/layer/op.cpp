// layer: its fields, and what follows from its parts: tensors, stages, families, the definition.
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <utility>

#include "core/error.hpp"
#include "device/group_layout.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/part_stages.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "kernels/gemm/quantise/quantise.hpp"
#include "kernels/layer/layer.hpp"
#include "kernels/moe/moe.hpp"
#include "kernels/moe_route/moe_route.hpp"
#include "kernels/rope/rope.hpp"
#include "registry/last_problems.hpp"
#include "registry/part_family.hpp"

namespace fftune::layer {
namespace {

constexpr std::int64_t most_layers = 256;

/// Inputs that all layers of a plan share.
constexpr const char* shared_inputs[] = {"x",       "positions", "angles", "slots",
                                         "lengths", "pages",     "group",  "first_expert"};

/// The tensors of a layer of its own, in the order of the buffers.
constexpr const char* own_inputs[] = {"attn_norm",
                                      "attn_norm_bias",
                                      "w_q",
                                      "w_k",
                                      "w_v",
                                      "b_q",
                                      "b_k",
                                      "b_v",
                                      "w_qkv",
                                      "w_qkv_scale",
                                      "w_qkv_zero",
                                      "b_qkv",
                                      "q_norm",
                                      "k_norm",
                                      "q_norm_bias",
                                      "k_norm_bias",
                                      "k_cache",
                                      "v_cache",
                                      "sinks",
                                      "residual_scale",
                                      "w_o",
                                      "w_o_scale",
                                      "w_o_zero",
                                      "b_o",
                                      "attn_post_norm",
                                      "ffn_norm",
                                      "ffn_norm_bias",
                                      "w_router",
                                      "b_router",
                                      "choice_bias",
                                      "w_gate",
                                      "w_up",
                                      "w_gate_up",
                                      "w_down",
                                      "w_gate_scale",
                                      "w_gate_zero",
                                      "w_up_scale",
                                      "w_up_zero",
                                      "w_gate_up_scale",
                                      "w_down_scale",
                                      "w_down_zero",
                                      "b_gate",
                                      "b_up",
                                      "b_gate_up",
                                      "b_down",
                                      "w_shared_router",
                                      "w_shared_gate",
                                      "w_shared_up",
                                      "w_shared_down",
                                      "ffn_post_norm"};

bool is_shared(const std::string& name) {
  return std::find(std::begin(shared_inputs), std::end(shared_inputs), name) !=
         std::end(shared_inputs);
}

/// Where the tensor stands among the inputs.
std::ptrdiff_t rank_of(const std::string& name) {
  const auto shared = std::find(std::begin(shared_inputs), std::end(shared_inputs), name);
  if (shared != std::end(shared_inputs)) return shared - std::begin(shared_inputs);
  return std::size(shared_inputs) +
         (std::find(std::begin(own_inputs), std::end(own_inputs), name) - std::begin(own_inputs));
}

Problem one_layer(const Problem& problem) {
  Problem one = problem;
  one.sizes.erase("layers");
  return one;
}

/// How many keys the sequences have, and where: what the tensors positions, slots, lengths and
/// pages agree on.
class Sequences {
 public:
  explicit Sequences(const Problem& problem)
      : s_(size_or(problem, "s", 1)),
        cache_(problem.size("cache")),
        page_(size_or(problem, "page", 0)) {
    const auto count = static_cast<std::size_t>(problem.size("batch"));
    lengths_.assign(count, cache_);
    std::mt19937_64 random(count);
    if (problem.has("lengths", "ragged"))
      for (std::size_t i = 1; i < count; ++i)
        lengths_[i] =
            s_ + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(cache_ - s_ + 1));
    if (page_ > 0) deal_pages(layer::pages_of(problem), random);
  }

  /// Pages with new tokens of all sequences, at most.
  static std::int64_t written_pages(const Problem& problem) {
    const std::int64_t page = problem.size("page");
    return problem.size("batch") * std::min(ceil_div(size_or(problem, "s", 1) - 1, page) + 1,
                                            ceil_div(problem.size("cache"), page));
  }

  void draw_lengths(std::span<double> values) const {
    std::copy(lengths_.begin(), lengths_.end(), values.begin());
  }
  void draw_positions(std::span<double> values) const {
    for_each_token(values, [](std::size_t, std::int64_t place) { return place; });
  }
  void draw_slots(std::span<double> values) const {
    for_each_token(values, [&](std::size_t sequence, std::int64_t place) {
      if (page_ == 0) return static_cast<std::int64_t>(sequence) * cache_ + place;
      return pages_[sequence * width() + static_cast<std::size_t>(place / page_)] * page_ +
             place % page_;
    });
  }
  void draw_pages(std::span<double> values) const {
    std::copy(pages_.begin(), pages_.end(), values.begin());
  }

 private:
  template <typename ValueOf>
  void for_each_token(std::span<double> values, const ValueOf& value_of) const {
    for (std::size_t row = 0; row < values.size(); ++row) {
      const auto sequence = row / static_cast<std::size_t>(s_);
      const auto token = static_cast<std::int64_t>(row) % s_;
      values[row] = static_cast<double>(value_of(sequence, lengths_[sequence] - s_ + token));
    }
  }

  std::size_t width() const { return static_cast<std::size_t>(ceil_div(cache_, page_)); }

  /// Pages with new tokens belong to one sequence; the others may be shared, as prefixes are.
  void deal_pages(std::int64_t count, std::mt19937_64& random) {
    std::vector<std::int64_t> order(static_cast<std::size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    pages_.assign(lengths_.size() * width(), -1);
    std::size_t dealt = 0;
    for (std::size_t i = 0; i < lengths_.size(); ++i)
      for (std::int64_t at = (lengths_[i] - s_) / page_; at <= (lengths_[i] - 1) / page_; ++at)
        pages_[i * width() + static_cast<std::size_t>(at)] = order[dealt++];
    const std::size_t others = order.size() - dealt;
    std::size_t shared = 0;
    for (std::int64_t& page : pages_)
      if (page < 0 && others > 0) page = order[dealt + shared++ % others];
  }

  std::int64_t s_, cache_, page_;
  std::vector<std::int64_t> lengths_, pages_;
};

/// Test data of what says where the sequences' tokens are, and of what the router chooses by.
void set_draw(const Problem& problem, TensorSpec& tensor) {
  const auto by = [&](void (Sequences::*draw)(std::span<double>) const) {
    tensor.draw = [of = std::make_shared<const Problem>(problem), draw](
                      std::uint64_t, std::span<double> values) { (Sequences(*of).*draw)(values); };
  };
  if (tensor.name == "positions") by(&Sequences::draw_positions);
  if (tensor.name == "slots") by(&Sequences::draw_slots);
  if (tensor.name == "lengths") by(&Sequences::draw_lengths);
  if (tensor.name == "pages") by(&Sequences::draw_pages);
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
      // Which ids a part expects, the part that writes them does not know.
      if (known && !known->draw && known->role == Role::intermediate) known->draw = tensor.draw;
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
    return "";
  }
  for (const char* name :
       {"experts", "top-k", "shared", "own-experts", "shared-h", "groups", "top-groups"})
    if (problem.sizes.contains(name))
      return fmt::format("{}={} is of ffn=moe", name, problem.size(name));
  for (const char* name : {"score", "order", "renormalise", "routing", "gate-up", "group-score",
                           "choice-bias", "router-bias", "route-scale", "shared-gate", "logits"})
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

std::vector<OptionField> option_fields() {
  std::vector<OptionField> fields{
      {"act", "activation of the feed-forward network", gated_activation_names()},
      rare_option(
          "norm",
          "normalisation of rows: by the root mean square, or layer normalisation with biases",
          {"rms", "layer"}),
      rare_option("post-norms",
                  "whether the results of attention and of the feed-forward network are "
                  "normalised before they are added; only: their inputs are not",
                  {"no", "yes", "only"}),
      rare_option("residual-scale",
                  "whether a vector multiplies what is added to the residual; experts have "
                  "route-scale",
                  {"no", "yes"}),
      rare_option("block",
                  "serial: the feed-forward network follows attention; parallel: it takes the "
                  "same normalised x; parallel-norms: it takes x by a second norm",
                  {"serial", "parallel", "parallel-norms"}),
      rare_option("ffn",
                  "the feed-forward network: with a gate, plain without, or a mixture of experts "
                  "with gates",
                  {"gated", "plain", "moe"}),
      rare_option("score", "function of a router's logit that gives an expert's score",
                  {"softmax", "sigmoid"}),
      rare_option("order",
                  "whether the router's softmax is over all experts, before the choice, or over "
                  "the chosen ones after it",
                  {"before", "after"}),
      rare_option("renormalise", "whether the weights of a token's experts add up to 1",
                  {"no", "yes"}),
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
       .routing = true},
      rare_option("convention",
                  "where the norms round, and whether weights are kept as their distance from 1",
                  {"llama", "gemma", "t5"}),
      rare_number("eps", "added to the norms' mean square", "1e-06", {0, 1}),
      rare_option("qkv-bias", "whether q, k and v have a bias", {"no", "yes"}),
      rare_option("qkv-weights",
                  "the weights of q, k and v: separate, or one w_qkv; packed: all rows of q, then "
                  "k, then v; grouped: for each head of k its heads of q, then k, then v",
                  {"separate", "packed", "grouped"}),
      rare_option("qk-norm",
                  "norms of q and k; yes: RMSNorm of each head; rows: RMSNorm over all heads; "
                  "layer: layer normalisation of each head",
                  {"no", "yes", "rows", "layer"}),
      rare_option("qk-norm-order", "whether heads are normalised before RoPE or after it",
                  {"before", "after"}),
      rare_option("sinks",
                  "whether each head has a logit that joins attention's softmax without a value",
                  {"no", "yes"}),
      rare_option("out-bias", "whether the output product has a bias", {"no", "yes"}),
      rare_option("ffn-bias", "whether the feed-forward network has biases", {"no", "yes"}),
      rare_option("rotation", "RoPE of q and k: pairs rotary/2 apart, neighbours, or none",
                  {"halves", "interleaved", "none"}),
      rare_number("softcap", "soft cap c of attention's scores, c tanh(x / c); 0: none", "0",
                  {0, 1e6}),
      rare_number("scale", "scale of attention's scores; 0: 1 / sqrt(dim)", "0", {0, 1e6}),
      rare_option("link",
                  "how ranks sum; peers: through a group's memory; nccl: by NCCL; loopback: one "
                  "rank plays all, with equal summands",
                  {"loopback", "peers", "nccl"}),
      rare_option("lengths",
                  "keys of the sequences in tests and measurements: as many as the cache has room "
                  "for, or fewer",
                  {"full", "ragged"})};
  for (OptionField& field : angle_options()) fields.push_back(std::move(field));
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
            .example = 2048},
           {.name = "heads", .help = "heads of q", .max = 1024, .example = 16},
           {.name = "dim", .help = "features of a head", .max = 512, .example = 64},
           {.name = "cache",
            .help = "keys that the cache has room for, of a sequence",
            .max = 1 << 24,
            .example = 2048},
           kv_heads_size("heads of k, and of v", 1024, 4),
           rare_size("s", "new tokens of each sequence; 1 if left out", 1 << 24, 512, usually(1)),
           rare_size("layers", "number of layers, each with its own weights and caches",
                     most_layers, 16),
           rare_size("experts", "experts to choose from, with ffn=moe", moe_route::most_experts,
                     128),
           rare_size("top-k", "experts that a token chooses", moe_route::most_choices, 8),
           rare_size("shared", "experts that every token goes through; left out: none",
                     moe::most_shared, 1),
           moe::own_experts_size(),
           rare_size(
               "shared-h",
               "intermediate size of a network with weights of its own beside the experts, for "
               "every token; left out: none",
               1 << 24, 1408),
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
      .rows_are_alike = false};
}

class LayerOp final : public DescribedOp {
 public:
  LayerOp() : DescribedOp(facts()) {}

  std::vector<KnownModel> known_models() const override { return layer::known_models(); }

  std::vector<std::string> sharded_sizes() const override { return layer::sharded_sizes(); }

  std::string contradiction(const Problem& problem) const override {
    if (const auto s = size_or(problem, "s", 1); s > problem.size("cache"))
      return fmt::format("s={} exceeds cache={}: new tokens go to the cache too", s,
                         problem.size("cache"));
    if (problem.sizes.contains("pages") && !problem.sizes.contains("page"))
      return "pages without page: give the keys of a page";
    if (problem.options.contains("link") && !problem.sizes.contains("ranks"))
      return "link=" + problem.option("link") + " without ranks: give the ranks of the group";
    if (problem.sizes.contains("ranks") && problem.has("qk-norm", "rows"))
      return fmt::format(
          "qk-norm=rows with ranks={}: a norm of all heads needs those of other ranks",
          problem.size("ranks"));
    const bool layer_norm = problem.has("norm", "layer");
    if (layer_norm && problem.options.contains("convention"))
      return "convention=" + problem.option("convention") + " is of norm=rms";
    if (problem.has("residual-scale", "yes") && problem.options.contains("post-norms"))
      return fmt::format("residual-scale=yes with post-norms={}: a norm takes a factor away again",
                         problem.option("post-norms"));
    if (problem.has("residual-scale", "yes") && problem.has("shared-gate", "yes"))
      return "residual-scale=yes with shared-gate=yes: that network has no factor";
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
    if (!problem.sizes.contains("page")) return "";
    const std::int64_t least = Sequences::written_pages(problem);
    if (pages_of(problem) < least)
      return fmt::format("pages={}: new tokens alone are in up to {} pages", pages_of(problem),
                         least);
    return "";
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
}  // namespace fftune::layer

const fftune::Op& fftune::layer_op() {
  static const layer::LayerOp op;
  return op;
}
