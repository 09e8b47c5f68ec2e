#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/common/op_parts.hpp"
#include "kernels/qkv/qkv.hpp"
#include "kernels/rope/part.hpp"

namespace fftune::qkv {
namespace {

bool is(const Problem& problem, const char* option, const char* choice) {
  return problem.has(option, choice);
}

/// Sizes that are left out (SizeField::when_absent): features of heads that are rotated, the rows
/// of a table, and the form of a cache.
std::optional<std::int64_t> usual_rotary(const Problem& problem) {
  return is(problem, "rotation", "none") || !problem.options.contains("rotation")
             ? std::nullopt
             : same_as("dim")(problem);
}
std::optional<std::int64_t> table_positions(const Problem& problem) {
  if (!usual_rotary(problem) || problem.options.contains("angles")) return std::nullopt;
  return rope::usual_positions;
}
WhenAbsent if_cached(const char* size) {
  return [size](const Problem& problem) {
    return is(problem, "cache", "yes") ? same_as(size)(problem) : std::nullopt;
  };
}

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  const Layer layer = layer_of(problem);
  const auto packed = packed_weights(problem);
  const DType dtype = layer.dtype;
  const double by_d = 1 / std::sqrt(static_cast<double>(layer.d));
  const std::int64_t q = layer.heads * layer.dim, kv = layer.kv_heads * layer.dim;
  const std::int64_t q_rows = layer.q_columns();
  std::vector<TensorSpec> tensors{{"x", dtype, {layer.m, layer.d}, Role::input, 1}};
  const auto weight = [&](const char* name, std::int64_t rows) {
    tensors.push_back({name, dtype, {rows, layer.d}, Role::input, by_d});
  };
  const auto vector = [&](const char* name, std::int64_t elements) {
    tensors.push_back({name, dtype, {elements}, Role::input, 1});
  };
  if (layer.packed) {
    for (const PackedWeight& own : packed) append(tensors, packed_tensors(own, by_d));
    if (quantises(problem))
      for (TensorSpec& tensor :
           quantised_weight("w", layer.columns(), layer.d, layer.scaling, by_d))
        tensors.push_back(std::move(tensor));
    else if (packed.empty())
      weight("w", layer.columns());
    if (layer.bias) vector("bias", layer.columns());
  } else {
    weight("w_q", q_rows);
    if (layer.keys) weight("w_k", kv), weight("w_v", kv);
    if (layer.bias) vector("b_q", q_rows);
    if (layer.bias && layer.keys) vector("b_k", kv), vector("b_v", kv);
  }
  if (layer.normalises()) {
    const bool rows = layer.norm == HeadNorm::rows;
    vector("q_norm", rows ? q : layer.dim);
    if (layer.keys) vector("k_norm", rows ? kv : layer.dim);
  }
  if (layer.norm == HeadNorm::centred) {
    vector("q_norm_bias", layer.dim);
    if (layer.keys) vector("k_norm_bias", layer.dim);
  }
  if (layer.rotates()) append(tensors, rope::angle_tensors(layer.rotated(), layer.m));
  const auto heads = [&](const char* name, Role role, std::int64_t rows, std::int64_t count) {
    tensors.push_back({name, dtype, {rows, count, layer.dim}, role, 1});
  };
  if (layer.cache) {
    for (const char* name : {"k_cache", "v_cache"}) {
      tensors.push_back({name,
                         layer.cache_format.dtype(dtype),
                         {layer.cache_rows, layer.kv_heads, layer.cache_head},
                         Role::updated,
                         cache_deviation(layer.cache_format)});
      tensors.back().behind = layer.cache_head - layer.dim;
    }
    tensors.push_back(
        rope::slots_tensor(layer.wide_slots ? DType::i64 : DType::i32, layer.m, layer.cache_rows));
    append(tensors, cache_scale_tensors(layer.cache_format, layer.kv_heads));
  }
  heads("q", Role::output, layer.m, layer.heads);
  if (!layer.cache && layer.keys)
    for (const char* name : {"k", "v"}) heads(name, Role::output, layer.m, layer.kv_heads);
  if (layer.gates) heads("gates", Role::output, layer.m, layer.heads);
  if (!layer.in_two_stages()) return tensors;
  if (layer.joined()) {
    for (const PackedWeight& own : packed) tensors.push_back(expanded_tensor(own));
    if (quantises(problem)) append(tensors, quantised_tensors(quantised_x(problem)));
    tensors.push_back({"qkv_raw", dtype, {layer.m, layer.columns()}, Role::intermediate, 1});
    return tensors;
  }
  heads("q_raw", Role::intermediate, layer.m, q_rows / layer.dim);
  if (!layer.keys) return tensors;
  for (const char* name : {"k_raw", "v_raw"})
    heads(name, Role::intermediate, layer.m, layer.kv_heads);
  return tensors;
}

/// The second stage: reads what the product wrote, and of the caches writes a row for each token.
StageSpec heads_stage(const Layer& layer, const std::vector<TensorSpec>& tensors) {
  StageSpec stage;
  stage.name = stage_heads;
  const double elements = static_cast<double>(layer.m * layer.columns());
  const auto add = [&](std::vector<std::string>& names, const TensorSpec& tensor) {
    names.push_back(tensor.name);
    if (tensor.role == Role::input) stage.bytes += static_cast<double>(tensor.bytes());
  };
  for (const TensorSpec& tensor : tensors) {
    const std::string& name = tensor.name;
    if (name == "qkv_raw" || name == "q_raw" || name == "k_raw" || name == "v_raw" ||
        tensor.role == Role::updated || name.find("norm") != std::string::npos ||
        name == "positions" || name == "angles" || name == "slots" || name == "k_scale" ||
        name == "v_scale")
      add(stage.inputs, tensor);
    if (tensor.role == Role::output || tensor.role == Role::updated) add(stage.outputs, tensor);
  }
  stage.bytes += 2 * elements * static_cast<double>(dtype_bytes(layer.dtype));
  stage.flops = 8 * elements;
  stage.reduction_length = layer.norm == HeadNorm::rows ? layer.heads * layer.dim : layer.dim;
  return stage;
}

std::vector<OptionField> option_fields() {
  std::vector<std::string> weights{"separate", "packed", "grouped"};
  const auto formats = packed_format_names();
  weights.insert(weights.end(), formats.begin(), formats.end());
  std::vector<OptionField> fields{
      rare_option(
          "weights",
          "weights and biases of q, k and v: separate, or all rows in one, dense (packed) or in a "
          "packed format; grouped: for each head of k its heads of q, then k, then v",
          std::move(weights)),
      rare_option(
          "gates",
          "whether w_q has, behind the rows of each head, as many of its gate, whose products "
          "are written as they are",
          {"no", "yes"}),
      rare_option("keys", "whether there are k and v, or q alone, of weights=separate",
                  {"yes", "no"}),
      rare_option("bias", "whether q, k and v have a bias", {"no", "yes"}),
      rare_option(
          "norm",
          "norms of q and k; yes: RMSNorm of each head; rows: RMSNorm over all heads; layer: "
          "layer normalisation of each head",
          {"no", "yes", "rows", "layer"}),
      rare_option("norm-order", "whether heads are normalised before RoPE or after it",
                  {"before", "after"}),
      rare_option("v-norm", "whether each head of v has an RMSNorm, without weights",
                  {"no", "yes"}),
      rare_option("convention",
                  "weights of the norm: factors, or (gemma) kept as their distance from 1",
                  {"llama", "gemma"}),
      rare_number("eps", "added to the norm's mean square", "1e-06", {0, 1}),
      rare_option("rotation", "RoPE of q and k: none, pairs rotary/2 apart, or neighbours",
                  {"none", "halves", "interleaved"}),
      rare_option(
          "cache",
          "whether k and v are written to rows of caches, by slots: nowhere by one of no row",
          {"no", "yes"}),
      {.name = "slots",
       .help = "element type of the slots",
       .choices = {"i32", "i64"},
       .rare = true,
       .performance_neutral = true},
      batch_invariant_option()};
  for (OptionField& field : cache_format_options()) fields.push_back(std::move(field));
  const auto angles = rope::angle_options();
  fields.insert(fields.end(), angles.begin(), angles.end());
  for (OptionField& field : packed_options())
    if (field.name != "weights") fields.push_back(std::move(field));
  fields.push_back(quantise_option());
  return fields;
}

OpFacts facts() {
  return {
      .name = "qkv",
      .summary =
          "queries, keys and values of attention: x w^T (+ bias, head norms, RoPE, into a cache)",
      .passes = {"fwd"},
      .sizes = {product_tokens(),
                {.name = "d", .help = "features of a token"},
                {.name = "heads", .help = "heads of q", .max = most_heads, .example = 16},
                {.name = "dim", .help = "features of a head", .max = most_features, .example = 64},
                kv_heads_size("heads of k, and of v", most_heads, 4),
                rare_size("rotary", "features of a head to rotate, an even number; all if left out",
                          most_features, 32, usual_rotary),
                rope::positions_size("4096", table_positions),
                rope::cache_slots_size("the caches", if_cached("m")),
                neutral(rare_size(
                    "cache-head",
                    "elements from a head of the caches to the next one, a multiple of dim; dim "
                    "if left out",
                    1 << 20, 128, if_cached("dim")))},
      .options = option_fields(),
      .families = {families},
      .baselines = baselines};
}

class Qkv final : public DescribedOp {
 public:
  Qkv() : DescribedOp(facts()) {}

  bool rows_are_alike(const Problem& problem) const override { return !layer_of(problem).cache; }

  std::string contradiction(const Problem& problem) const override {
    const Layer layer = layer_of(problem);
    if (layer.rotary > layer.dim)
      return fmt::format("rotary={} exceeds dim={}", layer.rotary, layer.dim);
    if (layer.rotates() && layer.rotary % 2 != 0)
      return fmt::format("rotary={} is odd: features are rotated in pairs", layer.rotary);
    if (!layer.rotates() && problem.sizes.contains("rotary"))
      return "rotary with rotation=none: nothing is rotated";
    if (problem.sizes.contains("positions") && !(layer.rotates() && layer.table))
      return "positions are those of a table of angles: there is none";
    if (problem.sizes.contains("cache-slots") && !layer.cache)
      return "cache-slots with cache=no: there is no cache";
    if (problem.sizes.contains("cache-head") && !layer.cache)
      return "cache-head with cache=no: there is no cache";
    if (layer.cache_format.e4m3 && !layer.cache)
      return "cache-format=e4m3 with cache=no: there is no cache";
    if (auto reason = cache_format_contradiction(problem); !reason.empty()) return reason;
    if (layer.cache_head % layer.dim != 0)
      return fmt::format("cache-head={} is no multiple of dim={}", layer.cache_head, layer.dim);
    if (is(problem, "norm-order", "after") && (!layer.normalises() || layer.norm == HeadNorm::rows))
      return fmt::format("norm-order=after with norm={}: it is of norm=yes and norm=layer",
                         option_or(problem, "norm", "no"));
    if (layer.norm == HeadNorm::centred && problem.options.contains("convention"))
      return "convention=gemma with norm=layer: weights of layer normalisation are factors";
    if (is(problem, "gates", "yes") && layer.packed)
      return fmt::format("gates=yes with {}: gates are rows of w_q, which is separate",
                         quantises(problem) ? "quantise=" + problem.option("quantise")
                                            : "weights=" + problem.option("weights"));
    if (!layer.keys)
      for (const auto& [holds, field] : {std::pair{layer.packed, "weights that are not separate"},
                                         {layer.gates, "gates=yes"},
                                         {layer.cache, "cache=yes"},
                                         {layer.v_norm, "v-norm=yes"}})
        if (holds) return fmt::format("keys=no with {}: there is q alone", field);
    if (layer.grouped && layer.heads % layer.kv_heads != 0)
      return fmt::format("weights=grouped: kv-heads={} do not divide heads={}", layer.kv_heads,
                         layer.heads);
    if (layer.rotates())
      if (auto reason = rope::contradiction_of_angles(*this, problem); !reason.empty())
        return reason;
    if (auto reason = quantise_contradiction(problem); !reason.empty()) return reason;
    return packed_contradiction(problem, "d", layer.d);
  }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return tensors_of(problem);
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    const Layer layer = layer_of(problem);
    const auto tensors = tensors_of(problem);
    StageSpec stage = stage_spec(stage_product, product_gemm(problem), tensors);
    if (const auto packed = packed_weights(problem); !packed.empty())
      return {expand_spec(stage_expand, packed, tensors), stage, heads_stage(layer, tensors)};
    if (quantises(problem))
      return {quantise_spec(stage_quantise, quantised_x(problem), tensors), stage,
              heads_stage(layer, tensors)};
    if (layer.in_two_stages()) return {stage, heads_stage(layer, tensors)};
    if (layer.cache) {
      // Only the written rows of the caches count.
      const auto rows = std::min(layer.m, layer.cache_rows);
      for (const char* name : {"k_cache", "v_cache"}) {
        stage.inputs.emplace_back(name);
        stage.bytes -= static_cast<double>(tensors[tensor_index(tensors, name)].bytes());
        stage.bytes += static_cast<double>(rows * layer.kv_heads * layer.dim) *
                       static_cast<double>(dtype_bytes(layer.dtype));
      }
    }
    return {stage};
  }

  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    qkv::reference(problem, stage, tensors, parallel);
  }
};

}  // namespace

Layer layer_of(const Problem& problem) {
  auto layer = sizes_of<Layer>(
      problem,
      {{"m", &Layer::m}, {"d", &Layer::d}, {"heads", &Layer::heads}, {"dim", &Layer::dim}});
  layer.keys = !is(problem, "keys", "no");
  layer.kv_heads = layer.keys ? size_or(problem, "kv-heads", layer.heads) : 0;
  layer.rotary = size_or(problem, "rotary", layer.dim);
  layer.positions = size_or(problem, "positions", rope::usual_positions);
  layer.cache_rows = size_or(problem, "cache-slots", layer.m);
  layer.cache_head = size_or(problem, "cache-head", layer.dim);
  layer.epsilon = number_or_default(qkv_op(), problem, "eps");
  if (is(problem, "convention", "gemma")) layer.norm_offset = 1;
  layer.rotation = is(problem, "rotation", "halves")        ? head_rotation::halves
                   : is(problem, "rotation", "interleaved") ? head_rotation::interleaved
                                                            : head_rotation::none;
  layer.grouped = is(problem, "weights", "grouped");
  layer.format = packed_format(problem);
  layer.scaling = quantised_scaling(problem);
  layer.packed = layer.joined() || is(problem, "weights", "packed");
  layer.gates = is(problem, "gates", "yes") && !layer.packed;  // else a contradiction
  layer.bias = is(problem, "bias", "yes");
  layer.norm = is(problem, "norm", "yes")     ? HeadNorm::head
               : is(problem, "norm", "rows")  ? HeadNorm::rows
               : is(problem, "norm", "layer") ? HeadNorm::centred
                                              : HeadNorm::none;
  layer.norm_last = layer.normalises() && is(problem, "norm-order", "after");
  layer.v_norm = is(problem, "v-norm", "yes");
  layer.table = !problem.options.contains("angles") || is(problem, "angles", "table");
  layer.cache = is(problem, "cache", "yes");
  layer.wide_slots = layer.cache && is(problem, "slots", "i64");
  layer.cache_format = cache_format(problem);
  layer.dtype = problem.dtype;
  return layer;
}

}  // namespace fftune::qkv

const fftune::Op& fftune::qkv_op() {
  static const qkv::Qkv op;
  return op;
}
