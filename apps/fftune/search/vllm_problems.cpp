#include "apps/fftune/search/vllm_problems.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "apps/fftune/search/vllm_model.hpp"

namespace fftune::tool {
namespace {

using namespace vllm;

constexpr std::int64_t most_graph_tokens = 512;
/// Batches with prompts have no graph. Their prompts are this long.
constexpr std::int64_t prompt_tokens[] = {1024, 4096};
constexpr std::int64_t tokens_of_prompt = 1024;
/// Keys of all sequences that the searched attention has in memory: about as many as vLLM's cache
/// holds beside a model. max_model_len times the sequences would fit on no device.
constexpr std::int64_t cached_keys = std::int64_t{1} << 19;

using Sizes = std::map<std::string, std::int64_t>;
using OptionValues = std::map<std::string, std::string>;

bool has_option(const Op& op, std::string_view name) {
  const auto all = options_of(op, "fwd");
  return std::any_of(all.begin(), all.end(),
                     [&](const OptionField& option) { return option.name == name; });
}

/// Batches of pure decoding, which have graphs, and those with prompts.
enum class Batches { decoding, prompts, both };

class Problems {
 public:
  Problems(const Catalog& catalog, const VllmServing& serving, DeviceKind kind)
      : catalog_(catalog), serving_(serving), kind_(kind) {}

  /// A problem for each number of tokens. `count`: the size that has it.
  void add(const char* op_name, DType dtype, const Sizes& sizes, const OptionValues& options,
           const char* count = "m", Batches batches = Batches::decoding) {
    const Op& op = catalog_.op(op_name);
    for (const std::int64_t tokens : tokens_(batches)) {
      Problem problem{op_name, "fwd", dtype, sizes, options};
      problem.sizes[count] = tokens;
      // Attention counts the rows of all prompts.
      if (count == std::string_view("s"))
        problem.sizes["b"] = std::max<std::int64_t>(tokens / tokens_of_prompt, 1);
      // The others have one way to compute a token.
      if (serving_.batch_invariant && has_option(op, "batch-invariant"))
        problem.options["batch-invariant"] = "yes";
      if (const auto page = sizes.find("page"); page != sizes.end())
        problem.sizes["pages"] = pages_(problem.sizes.at("b"), sizes.at("kv"), page->second);
      add_one_(op, canonical(op, std::move(problem), kind_));
    }
  }

  /// The parts of the op layer in batches of `batches`: all but those that are left out.
  void add_layer(Sizes sizes, const OptionValues& options, Batches batches,
                 const std::set<std::string>& without = {}) {
    const Op& op = catalog_.op("layer");
    for (const std::int64_t tokens : tokens_(batches)) {
      sizes["batch"] = tokens;
      sizes["pages"] = pages_(tokens, sizes.at("cache"), sizes.at("page"));
      const Problem whole =
          canonical(op, Problem{"layer", "fwd", DType::bf16, sizes, options}, kind_);
      for (OpPart& part : op.parts(whole))
        if (!without.contains(part.name)) add_one_(*part.op, std::move(part.problem));
    }
  }
  std::vector<SearchedOp> ops() && { return std::move(ops_); }

 private:
  std::vector<std::int64_t> tokens_(Batches batches) const {
    if (!serving_.tokens.empty() && batches != Batches::prompts) return serving_.tokens;
    const std::vector<std::int64_t> prompts(std::begin(prompt_tokens), std::end(prompt_tokens));
    if (batches == Batches::prompts) return prompts;
    auto sizes = graph_sizes(serving_.max_num_seqs);
    if (!serving_.every_graph)
      std::erase_if(sizes, [](std::int64_t size) { return (size & (size - 1)) != 0; });
    if (batches == Batches::both) sizes.insert(sizes.end(), prompts.begin(), prompts.end());
    return sizes;
  }

  static std::int64_t pages_(std::int64_t sequences, std::int64_t keys, std::int64_t page) {
    return std::min(sequences * ((keys + page - 1) / page),
                    std::max(cached_keys / page, sequences));
  }

  void add_one_(const Op& op, Problem problem) {
    const auto place = std::find_if(ops_.begin(), ops_.end(),
                                    [&](const SearchedOp& each) { return each.op == &op; });
    auto& problems =
        place != ops_.end() ? place->problems : ops_.emplace_back(SearchedOp{&op, {}}).problems;
    if (std::find(problems.begin(), problems.end(), problem) == problems.end())
      problems.push_back(std::move(problem));
  }

  const Catalog& catalog_;
  const VllmServing& serving_;
  DeviceKind kind_;
  std::vector<SearchedOp> ops_;
};

/// "" where packed weights are moe-ffn's.
std::string why_not_packed_experts(const Config& config, const Quantisation& quantisation,
                                   const VllmServing& serving) {
  const std::string by = fmt::format("weights quantised by {}", quantisation.name);
  if (!serving.packed_experts) return by + ", which --parts packed-experts turns on";
  if (serving.batch_invariant) return by + ", with batch invariance";
  if (quantisation.kind == Quantisation::Kind::mxfp4)
    return is_gpt_oss(config) ? "" : by + " in another model than gpt-oss";
  if (!quantisation.unfit.empty()) return quantisation.unfit;
  if (quantisation.ordered) return by + " in the order of activations";
  return "";
}

/// "" where the experts are moe-ffn's.
std::string why_not_experts(const Config& config, const Quantisation& quantisation,
                            const std::vector<Experts>& experts, const VllmServing& serving) {
  using Kind = Quantisation::Kind;
  const bool is_packed = quantisation.kind == Kind::integers || quantisation.kind == Kind::mxfp4;
  const bool is_fp8 = quantisation.kind == Kind::fp8_blocks;
  // gpt-oss' clamped activation and biases are those of packed experts.
  const bool is_clamped = has_any(config, {"swiglu_limit", "swiglu_limits"}) || is_gpt_oss(config);
  if (is_clamped && !(is_gpt_oss(config) && quantisation.kind == Kind::mxfp4))
    return "a clamped activation, or biases";
  if (config.text({"model_type"}, "") == "nomic_bert") return "experts without a gate";
  if (activation_of(config).empty())
    return fmt::format("the activation {}", activation_word(config));
  if (is_packed) return why_not_packed_experts(config, quantisation, serving);
  if (!serving.experts) return "experts are not among --parts";
  if (quantisation.kind == Kind::other || quantisation.kind == Kind::fp8_tokens)
    return fmt::format("weights quantised by {}: fp8 with scales of blocks of {} is supported",
                       quantisation.name, scale_block);
  if (const std::string dtype = element_type(config); dtype != "bfloat16")
    return fmt::format("elements of {}", dtype);
  for (const Experts& kind : experts) {
    const std::int64_t h = slice("features of an expert", kind.h, serving.tensor_parallel);
    if (is_fp8 && (h % scale_block != 0 || kind.d % scale_block != 0))
      return fmt::format("fp8 of {} x {}, which are no whole blocks of {}", h, kind.d, scale_block);
  }
  return "";
}

/// "" where the plugin knows the decoder layers' structure.
std::string why_not_structure(const Config& config) {
  const Architecture architecture = architecture_of(config);
  if (architecture == Architecture::with_states)
    return "they have states, which needs states in --parts and in FFTUNE_VLLM";
  if (architecture == Architecture::other)
    return fmt::format(
        "{} is not Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, gpt-oss, Gemma 2 or Gemma 3",
        architecture_name(config));
  if (const JsonValue* const causal = config.find("is_causal");
      causal != nullptr && !config.flag({"is_causal"}))
    return "attention that is not causal";
  if (has_any(config, {"dual_chunk_attention_config"})) return "attention in chunks";
  for (const char* angles : {"rope_parameters", "rope_scaling"})
    if (has_any(config, {std::string(angles) + ".mrope_section"}))
      return "angles of several kinds of positions";
  if (config.flag({"mlp_bias"})) return "biases of the network";
  if (is_gemma(architecture) ? activation_of(config).empty() : activation_word(config) != "silu")
    return fmt::format("the activation {}", activation_word(config));
  return "";
}

/// "" where the decoder layers are run by ops.
std::string why_not_layers(const Config& config, const Quantisation& quantisation,
                           const VllmServing& serving) {
  if (std::string why = why_not_structure(config); !why.empty()) return why;
  if (serving.tensor_parallel > 1 && !serving.ranks)
    return "tensor parallelism, which needs ranks in --parts and in FFTUNE_VLLM";
  if (const std::string dtype = element_type(config); dtype != "bfloat16")
    return fmt::format("elements of {}", dtype);
  const Architecture architecture = architecture_of(config);
  if (is_gemma(architecture) && serving.batch_invariant)
    return "batch invariance, for layers that the op layer alone computes";
  if (quantisation.kind == Quantisation::Kind::none) return "";
  if (architecture == Architecture::gpt_oss && quantisation.kind == Quantisation::Kind::mxfp4)
    return !serving.packed_experts       ? "quantised weights"
           : serving.batch_invariant     ? "quantised weights with batch invariance"
           : serving.tensor_parallel > 1 ? "quantised weights under tensor parallelism"
                                         : "";
  if (quantisation.kind != Quantisation::Kind::integers || !quantisation.unfit.empty() ||
      !serving.serves(quantisation.bits))
    return "quantised weights";
  if (serving.tensor_parallel > 1) return "quantised weights under tensor parallelism";
  if (quantisation.ordered) return "quantised weights in the order of activations";
  const bool is_mixture =
      architecture == Architecture::qwen3_moe || architecture == Architecture::gpt_oss;
  if (quantisation.differs || (is_mixture && (!serving.packed_experts || !serving.experts)))
    return "quantised weights of layers that are not alike";
  if (serving.batch_invariant) return "quantised weights with batch invariance";
  return "";
}

/// "" where linear layers of integers are run by fftune.
std::string why_not_linears(const Config& config, const Quantisation& quantisation,
                            const VllmServing& serving) {
  if (!quantisation.unfit.empty()) return quantisation.unfit;
  if (is_fp8(quantisation)) {
    if (!serving.fp8_linears) return "weights of fp8, which --parts fp8-linears turns on";
    if (element_type(config) == "float32") return "elements of float32";
  } else if (!serving.serves(quantisation.bits)) {
    return fmt::format("weights of {} bits, which --parts linears turns on", quantisation.bits);
  }
  if (serving.batch_invariant) return "batch invariance";
  if (architecture_of(config) == Architecture::other)
    return fmt::format("the shapes of {}'s layers are not known here", architecture_name(config));
  return "";
}

const char* yes(bool holds) {
  return holds ? "yes" : "no";
}

std::int64_t network_width(const Config& config, const VllmServing& serving) {
  return slice("features of the network", config.integer(config_names::network_features),
               serving.tensor_parallel);
}

/// The options of a weight of integers; none of a dense one.
OptionValues format_of(const Quantisation& quantisation) {
  if (quantisation.kind != Quantisation::Kind::integers) return {};
  OptionValues options{
      {"weights", quantisation.bits == 4 ? "int4" : "int8"},
      {"group", quantisation.group == 0 ? "row" : fmt::format("{}", quantisation.group)}};
  if (quantisation.zeros) options["zeros"] = "yes";
  return options;
}

OptionValues with(OptionValues options, const OptionValues& more) {
  options.insert(more.begin(), more.end());
  return options;
}

void add_experts(const Config& config, const Quantisation& quantisation,
                 const std::vector<Experts>& experts, const VllmServing& serving,
                 Problems& problems) {
  using Kind = Quantisation::Kind;
  OptionValues options{{"act", activation_of(config)}};
  DType dtype = element_type(config) == "float16" ? DType::fp16 : DType::bf16;
  if (quantisation.kind == Kind::mxfp4)
    options = {{"weights", "mxfp4"}, {"act", "swiglu-oai"}, {"bias", "all"}};
  else if (quantisation.kind == Kind::integers)
    options = with(options, format_of(quantisation));
  else
    options["gate-up"] = "halves";
  if (quantisation.kind == Kind::fp8_blocks) {
    options["scales"] = "block";
    dtype = DType::fp8;
  }
  for (const Experts& kind : experts) {
    problems.add("moe-ffn", dtype,
                 {{"d", kind.d},
                  {"h", slice("features of an expert", kind.h, serving.tensor_parallel)},
                  {"experts", kind.count},
                  {"top-k", kind.choices}},
                 options, "m", Batches::both);
    // A softmax of the logits that were chosen.
    if (quantisation.kind == Kind::mxfp4)
      problems.add("moe-route", dtype, {{"experts", kind.count}, {"top-k", kind.choices}},
                   {{"order", "after"}}, "m", Batches::both);
  }
}

/// Linear layers of integers or of fp8: each of them, or where whole layers run by ops those of the
/// batches that they do not run.
void add_linears(const Config& config, const Quantisation& quantisation,
                 const std::vector<Experts>& experts, const VllmServing& serving, bool in_layers,
                 Problems& problems) {
  const LayerSizes sizes = sizes_of(config, serving.tensor_parallel);
  const DType dtype = element_type(config) == "float16" ? DType::fp16 : DType::bf16;
  const OptionValues format =
      is_fp8(quantisation)
          ? OptionValues{{"quantise",
                          quantisation.kind == Quantisation::Kind::fp8_blocks ? "block" : "token"}}
          : format_of(quantisation);
  const Batches batches = in_layers && serving.tokens.empty() ? Batches::prompts : Batches::both;
  const auto add = [&](std::int64_t k, std::int64_t n, bool bias) {
    problems.add("linear", dtype, {{"k", k}, {"n", n}}, with(format, {{"bias", yes(bias)}}), "m",
                 batches);
  };
  add(sizes.d, sizes.qkv_rows(), has_qkv_bias(config));
  add(sizes.attended(), sizes.d, has_out_bias(config));
  if (are_all_mixtures(config, experts)) return;
  const std::int64_t h = network_width(config, serving);
  if (in_layers) {
    problems.add("ffn", dtype, {{"d", sizes.d}, {"h", h}}, format, "m", batches);
    return;
  }
  const bool bias = config.flag({"mlp_bias"});
  add(sizes.d, 2 * h, bias);
  add(h, sizes.d, bias);
}

/// Keys of a sequence, in whole blocks.
std::int64_t most_keys(const Config& config, const VllmServing& serving) {
  const std::int64_t most =
      serving.max_model_len > 0 ? serving.max_model_len : config.integer(config_names::positions);
  return (most + serving.block_size - 1) / serving.block_size * serving.block_size;
}

/// The parts of the op layer for models whose layers it alone computes, or whose experts have
/// biases, in batches of pure decoding or others. The sums over devices are not searched here.
void add_parts(const Config& config, const Quantisation& quantisation,
               const std::vector<Experts>& experts, const VllmServing& serving, Batches batches,
               Problems& problems) {
  const Architecture architecture = architecture_of(config);
  const LayerSizes own = sizes_of(config, serving.tensor_parallel);
  Sizes sizes{{"d", own.d},
              {"heads", own.heads},
              {"kv-heads", own.kv_heads},
              {"dim", own.dim},
              {"cache", most_keys(config, serving)},
              {"page", serving.block_size}};
  OptionValues options{{"qkv-weights", "packed"},
                       {"qkv-bias", yes(has_qkv_bias(config))},
                       {"out-bias", yes(has_out_bias(config))},
                       {"angles", "table"}};
  if (serving.tensor_parallel > 1) sizes["ranks"] = serving.tensor_parallel;
  if (is_gemma(architecture)) {
    options.insert({{"act", activation_of(config)},
                    {"convention", "gemma"},
                    {"post-norms", "yes"},
                    {"qk-norm", yes(architecture == Architecture::gemma3)}});
    sizes["h"] = network_width(config, serving);
    // The number of inputs of a score, whose root divides it.
    if (const auto inputs = config.integer_if_any({"query_pre_attn_scalar"});
        inputs && *inputs != own.dim)
      options["scale"] = fmt::format("{}", 1 / std::sqrt(static_cast<double>(*inputs)));
    if (architecture == Architecture::gemma2)
      if (const JsonValue* const cap = config.find("attn_logit_softcapping"))
        options["softcap"] = json_line(*cap);
    for (const auto& [name, value] : format_of(quantisation)) options[name] = value;
    if (!format_of(quantisation).empty()) options.erase("qkv-weights");
  } else {
    options.insert({{"act", "swiglu-oai"},
                    {"sinks", "yes"},
                    {"ffn", "moe"},
                    {"order", "after"},
                    {"router-bias", "yes"},
                    {"ffn-bias", "yes"}});
    if (quantisation.kind == Quantisation::Kind::mxfp4)
      options.insert({{"weights", "mxfp4"}, {"attn-weights", "dense"}});
    else
      options["gate-up"] = "interleaved";
    sizes.insert({{"h", experts.front().h},
                  {"experts", experts.front().count},
                  {"top-k", experts.front().choices}});
  }
  std::set<std::string> without{"attn_reduce", "ffn_reduce"};
  if (batches == Batches::prompts) without.insert("attention");
  for (const std::int64_t window : windows_of(config, architecture)) {
    if (window > 0) sizes["window"] = window;
    problems.add_layer(sizes, options, batches, without);
  }
}

/// Attention over the pages of the cache, of new tokens in decoding or of prompts.
void add_attention(const Config& config, const VllmServing& serving, bool of_prompts,
                   Problems& problems) {
  const LayerSizes own = sizes_of(config, serving.tensor_parallel);
  const Architecture architecture = architecture_of(config);
  for (const std::int64_t window : windows_of(config, architecture)) {
    Sizes sizes{{"heads", own.heads},
                {"kv-heads", own.kv_heads},
                {"dim", own.dim},
                {"kv", most_keys(config, serving)},
                {"page", serving.block_size}};
    OptionValues options{{"lengths", "yes"}};
    if (architecture == Architecture::gpt_oss) options["sinks"] = "yes";
    if (window > 0) sizes["window"] = window;
    if (of_prompts) {
      options["mask"] = "causal";
      options["layout"] = "thd";
      problems.add("attention", DType::bf16, sizes, options, "s", Batches::prompts);
    } else {
      sizes["s"] = 1;
      problems.add("attention", DType::bf16, sizes, options, "b");
    }
  }
}

/// The parts of the op layer, or the ops one by one.
void add_layers(const Config& config, const Quantisation& quantisation,
                const std::vector<Experts>& experts, const VllmServing& serving,
                Problems& problems) {
  const Architecture architecture = architecture_of(config);
  const auto [d, heads, kv_heads, dim] = sizes_of(config, serving.tensor_parallel);
  const bool one = serving.tensor_parallel == 1;
  const OptionValues format = format_of(quantisation);
  const bool is_packed = !format.empty();
  const bool is_gpt_oss = architecture == Architecture::gpt_oss;

  const bool all_are_mixtures = are_all_mixtures(config, experts);
  const bool prompts = !is_packed && (serving.prompts || serving.batch_invariant ||
                                      (all_are_mixtures && one && serving.experts));
  if (is_gemma(architecture) || (is_gpt_oss && one && !serving.batch_invariant)) {
    add_parts(config, quantisation, experts, serving, Batches::decoding, problems);
    if (is_gpt_oss && quantisation.kind == Quantisation::Kind::none && prompts &&
        serving.tokens.empty()) {
      add_parts(config, quantisation, experts, serving, Batches::prompts, problems);
      add_attention(config, serving, true, problems);
    }
    return;
  }
  // A sum over devices lies between the product and the residual.
  const Batches batches = prompts ? Batches::both : Batches::decoding;
  problems.add("rmsnorm", DType::bf16, {{"d", d}}, {}, "m", batches);
  if (!one || !experts.empty())
    problems.add("rmsnorm", DType::bf16, {{"d", d}}, {{"residual", "yes"}}, "m", batches);
  const bool qwen3 = architecture == Architecture::qwen3 || architecture == Architecture::qwen3_moe;
  OptionValues qkv{{"bias", yes(has_qkv_bias(config))},
                   {"norm", yes(qwen3)},
                   {"rotation", "halves"},
                   {"cache", "yes"}};
  qkv = with(qkv, is_packed ? format : OptionValues{{"weights", "packed"}, {"slots", "i64"}});
  problems.add("qkv", DType::bf16,
               {{"d", d}, {"heads", heads}, {"kv-heads", kv_heads}, {"dim", dim}}, qkv, "m",
               batches);
  if (prompts && serving.tokens.empty()) add_attention(config, serving, true, problems);
  add_attention(config, serving, false, problems);
  // The bias of the output product is the first device's.
  const bool out_bias = has_out_bias(config);
  for (const bool bias : {false, true})
    if (bias ? out_bias : !(one && out_bias))
      problems.add("linear", DType::bf16, {{"k", heads * dim}, {"n", d}},
                   with(format, {{"residual", yes(one)}, {"bias", yes(bias)}}), "m", batches);
  if (one)
    for (const Experts& kind : experts) {
      // The router, and what chooses the experts of each token. Slices have vLLM's.
      problems.add("linear", DType::bf16, {{"k", d}, {"n", kind.count}},
                   {{"bias", yes(is_gpt_oss)}}, "m", batches);
      const OptionValues choice =
          is_gpt_oss ? OptionValues{{"order", "after"}}
                     : OptionValues{{"renormalise", yes(config.flag(config_names::renormalises))}};
      problems.add("moe-route", DType::bf16, {{"experts", kind.count}, {"top-k", kind.choices}},
                   choice, "m", batches);
      if (is_gpt_oss)
        problems.add("moe-ffn", DType::bf16,
                     {{"d", d}, {"h", kind.h}, {"experts", kind.count}, {"top-k", kind.choices}},
                     {{"act", "swiglu-oai"}, {"bias", "all"}, {"gate-up", "interleaved"}}, "m",
                     batches);
    }
  if (all_are_mixtures) return;
  const std::int64_t h = network_width(config, serving);
  OptionValues network;
  if (one) network = {{"norm", "rms"}, {"residual", "yes"}};
  if (!is_packed) problems.add("ffn", DType::bf16, {{"d", d}, {"h", h}}, network, "m", batches);
  // A part of the op layer, whose norm is a part of its own; it is not batch-invariant.
  if (one && !serving.batch_invariant)
    problems.add("ffn", DType::bf16, {{"d", d}, {"h", h}}, with(format, {{"residual", "yes"}}));
}

/// Whether some layers are Mamba-2's or have a gated delta rule, by the fields of configurations of
/// transformers.
bool has_recurrent_states(const Config& model) {
  return model
             .first({"linear_num_key_heads", "mamba_n_heads", "mamba_num_heads", "ssm_state_size",
                     "state_size"})
             .second != nullptr;
}

}  // namespace

std::vector<std::int64_t> graph_sizes(std::int64_t max_num_seqs) {
  std::vector<std::int64_t> sizes{1, 2, 4};
  for (std::int64_t size = 8; size <= most_graph_tokens; size += size < 256 ? 8 : 16)
    sizes.push_back(size);
  std::erase_if(sizes, [&](std::int64_t size) { return size > max_num_seqs; });
  return sizes;
}

VllmProblems vllm_problems(const Catalog& catalog, const JsonValue& config,
                           const VllmServing& serving, DeviceKind kind) {
  if (config.get_if<JsonValue::Object>() == nullptr)
    fail("no JSON object: give the config.json of a model");
  const Config model(language_configs(config));
  const Quantisation quantisation = quantisation_of(model);
  VllmProblems result;
  Problems problems(catalog, serving, kind);
  const auto experts = experts_of(model);
  const auto unless = [&](const char* part, const std::string& why, const auto& add) {
    if (why.empty())
      add();
    else
      result.left_alone.push_back(fmt::format("{} stay vLLM's: {}", part, why));
    return why.empty();
  };
  const bool has_states = serving.states && architecture_of(model) == Architecture::with_states;
  const bool has_layers = serving.layers && !has_states &&
                          unless("layers", why_not_layers(model, quantisation, serving), [&] {
                            add_layers(model, quantisation, experts, serving, problems);
                          });
  if (quantisation.kind == Quantisation::Kind::integers
          ? serving.linears || serving.int4_linears
          : is_fp8(quantisation) && serving.fp8_linears)
    unless("linear layers", why_not_linears(model, quantisation, serving),
           [&] { add_linears(model, quantisation, experts, serving, has_layers, problems); });
  const bool is_packed = quantisation.kind == Quantisation::Kind::integers ||
                         quantisation.kind == Quantisation::Kind::mxfp4;
  if (!experts.empty() && (serving.experts || (is_packed && serving.packed_experts)))
    unless("experts", why_not_experts(model, quantisation, experts, serving),
           [&] { add_experts(model, quantisation, experts, serving, problems); });
  else if (serving.experts && !serving.layers && experts.empty())
    result.left_alone.push_back(fmt::format("{} has no experts", architecture_name(model)));
  for (const auto& [wanted, part] :
       {std::pair(serving.linear_attention && has_recurrent_states(model),
                  "cores of linear attention"),
        {has_states, "layers with states"}})
    if (wanted)
      result.left_alone.push_back(
          fmt::format("{} are not searched: how far states are apart follows from the pages that "
                      "vLLM chooses",
                      part));
  result.ops = std::move(problems).ops();
  if (result.ops.empty() && result.left_alone.empty())
    fail("there is nothing to search: no part that --parts names is one of this model");
  if (result.ops.empty())
    fail(fmt::format("there is nothing to search: {}", fmt::join(result.left_alone, "; ")));
  return result;
}

}  // namespace fftune::tool
