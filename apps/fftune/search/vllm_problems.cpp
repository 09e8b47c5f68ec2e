#include "apps/fftune/search/vllm_problems.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <initializer_list>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "core/error.hpp"

namespace fftune::tool {
namespace {

constexpr std::int64_t most_graph_tokens = 512;
/// Batches with prompts have no graph. Their prompts are this long.
constexpr std::int64_t prompt_tokens[] = {1024, 4096};
constexpr std::int64_t tokens_of_prompt = 1024;
/// Keys of all sequences that the searched attention has in memory: about as many as vLLM's cache
/// holds beside a model. max_model_len times the sequences would fit on no device.
constexpr std::int64_t cached_keys = std::int64_t{1} << 19;
constexpr std::int64_t scale_block = 128;  // rows and columns of a weight with one fp8 scale

[[noreturn]] void fail(const std::string& why) {
  throw Error(ErrorKind::invalid_input, why);
}

/// Fields of a configuration; null counts as absent.
class Config {
 public:
  explicit Config(const JsonValue& object) : object_(object) {}

  const JsonValue* find(std::string_view name) const {
    const JsonValue* const found = object_.find(name);
    return found != nullptr && found->get_if<std::nullptr_t>() == nullptr ? found : nullptr;
  }
  /// The first of these names that is there; nothing if none is.
  std::optional<std::int64_t> whole_if_any(std::initializer_list<std::string_view> names) const {
    for (const std::string_view name : names) {
      const JsonValue* const found = find(name);
      if (found == nullptr) continue;
      const auto* const value = found->get_if<std::int64_t>();
      if (value == nullptr || *value < 1 || *value > std::int64_t{1} << 30)
        fail(fmt::format("{}: expected a whole number from 1, found {}", name, json_brief(*found)));
      return *value;
    }
    return std::nullopt;
  }
  std::int64_t whole(std::initializer_list<std::string_view> names) const {
    if (const auto found = whole_if_any(names)) return *found;
    fail(fmt::format("{} is missing: give the config.json of a language model",
                     fmt::join(names, " or ")));
  }
  bool flag(std::string_view name, bool otherwise = false) const {
    const JsonValue* const found = find(name);
    if (found == nullptr) return otherwise;
    if (const bool* const value = found->get_if<bool>()) return *value;
    fail(fmt::format("{}: expected true or false, found {}", name, json_brief(*found)));
  }
  std::string text(std::string_view name, std::string otherwise) const {
    const JsonValue* const found = find(name);
    if (found == nullptr) return otherwise;
    if (const auto* const value = found->get_if<std::string>()) return *value;
    fail(fmt::format("{}: expected a text, found {}", name, json_brief(*found)));
  }

 private:
  const JsonValue& object_;
};

std::int64_t slice(std::string_view what, std::int64_t whole, std::int64_t devices) {
  if (whole % devices != 0)
    fail(fmt::format("--tp {} does not divide {} {}", devices, whole, what));
  return whole / devices;
}

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
    const auto place = std::find_if(ops_.begin(), ops_.end(),
                                    [&](const SearchedOp& each) { return each.op == &op; });
    auto& problems = place != ops_.end() ? place->problems : ops_.emplace_back(&op).problems;
    for (const std::int64_t tokens : tokens_(batches)) {
      Problem problem{op_name, "fwd", dtype, sizes, options};
      problem.sizes[count] = tokens;
      if (batches == Batches::prompts)
        problem.sizes["b"] = std::max<std::int64_t>(tokens / tokens_of_prompt, 1);
      // The others have one way to compute a token.
      if (serving_.batch_invariant && has_option(op, "batch-invariant"))
        problem.options["batch-invariant"] = "yes";
      if (const auto page = sizes.find("page"); page != sizes.end()) {
        const std::int64_t sequences = problem.sizes.at("b");
        problem.sizes["pages"] =
            std::min(sequences * ((sizes.at("kv") + page->second - 1) / page->second),
                     std::max(cached_keys / page->second, sequences));
      }
      problem = canonical(op, std::move(problem), kind_);
      if (std::find(problems.begin(), problems.end(), problem) == problems.end())
        problems.push_back(std::move(problem));
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

  const Catalog& catalog_;
  const VllmServing& serving_;
  DeviceKind kind_;
  std::vector<SearchedOp> ops_;
};

/// The kind of a model's weights: unquantised, fp8 with scales of blocks, or another.
struct Quantisation {
  bool any = false;
  bool fp8_blocks = false;
  std::string name;
};

Quantisation quantisation_of(const Config& config) {
  const JsonValue* const found = config.find("quantization_config");
  if (found == nullptr) return {};
  const Config own(*found);
  Quantisation quantisation{.any = true, .name = own.text("quant_method", "an unknown method")};
  const JsonValue* const block = own.find("weight_block_size");
  const auto* const extents = block ? block->get_if<JsonValue::Array>() : nullptr;
  quantisation.fp8_blocks =
      quantisation.name == "fp8" && extents != nullptr && extents->size() == 2 &&
      std::all_of(extents->begin(), extents->end(), [](const JsonValue& extent) {
        const auto* const value = extent.get_if<std::int64_t>();
        return value != nullptr && *value == scale_block;
      });
  return quantisation;
}

/// The architectures whose layers the plugin knows.
enum class Architecture { other, llama, qwen2, qwen3, qwen3_moe };

Architecture architecture_of(const std::string& name) {
  static const std::map<std::string, Architecture> known{
      {"LlamaForCausalLM", Architecture::llama},
      {"MistralForCausalLM", Architecture::llama},
      {"Qwen2ForCausalLM", Architecture::qwen2},
      {"Qwen3ForCausalLM", Architecture::qwen3},
      {"Qwen3MoeForCausalLM", Architecture::qwen3_moe}};
  const auto found = known.find(name);
  return found == known.end() ? Architecture::other : found->second;
}

std::string architecture_name(const Config& config) {
  const JsonValue* const all = config.find("architectures");
  const auto* const names = all ? all->get_if<JsonValue::Array>() : nullptr;
  const auto* const name =
      names && !names->empty() ? names->front().get_if<std::string>() : nullptr;
  if (name == nullptr)
    fail("architectures is missing: give the config.json of a model as it is saved");
  return *name;
}

struct Experts {
  std::int64_t count = 0, choices = 0, h = 0;
};

std::optional<Experts> experts_of(const Config& config) {
  const auto count = config.whole_if_any({"num_experts", "num_local_experts", "n_routed_experts"});
  if (!count) return std::nullopt;
  return Experts{*count, config.whole({"num_experts_per_tok"}),
                 config.whole({"moe_intermediate_size", "intermediate_size"})};
}

/// The name that fftune has for an activation; empty: none.
std::string activation_of(const Config& config) {
  static const std::map<std::string, std::string> known{
      {"silu", "silu"}, {"gelu", "gelu"}, {"gelu_pytorch_tanh", "gelu-tanh"}};
  const auto found = known.find(config.text("hidden_act", "silu"));
  return found == known.end() ? "" : found->second;
}

/// "" where the experts are moe-ffn's.
std::string why_not_experts(const Config& config, const Quantisation& quantisation,
                            const Experts& experts, std::int64_t devices) {
  if (config.find("swiglu_limit") || config.text("model_type", "") == "gpt_oss")
    return "a clamped activation and biases";
  if (activation_of(config).empty())
    return fmt::format("the activation {}", config.text("hidden_act", ""));
  if (quantisation.any && !quantisation.fp8_blocks)
    return fmt::format("weights quantised by {}: fp8 with scales of blocks of {} is supported",
                       quantisation.name, scale_block);
  const std::int64_t h = slice("features of an expert", experts.h, devices);
  if (quantisation.any &&
      (h % scale_block != 0 || config.whole({"hidden_size"}) % scale_block != 0))
    return fmt::format("fp8 of {} x {}, which are no whole blocks of {}", h,
                       config.whole({"hidden_size"}), scale_block);
  return "";
}

/// "" where the decoder layers are run by ops.
std::string why_not_layers(const Config& config, const Quantisation& quantisation) {
  const std::string name = architecture_name(config);
  const Architecture architecture = architecture_of(name);
  if (architecture == Architecture::other)
    return fmt::format("{} is not Llama, Mistral, Qwen2, Qwen3 or Qwen3-MoE", name);
  if (quantisation.any) return "quantised weights";
  const std::string dtype = config.text("dtype", config.text("torch_dtype", "bfloat16"));
  if (dtype != "bfloat16") return fmt::format("elements of {}", dtype);
  const bool may_slide = architecture == Architecture::llama ? name == "MistralForCausalLM"
                                                             : config.flag("use_sliding_window");
  if (may_slide && config.find("sliding_window")) return "a sliding window";
  if (config.flag("mlp_bias")) return "biases of the network";
  if (config.text("hidden_act", "silu") != "silu")
    return fmt::format("the activation {}", config.text("hidden_act", ""));
  return "";
}

void add_experts(const Config& config, const Quantisation& quantisation, const Experts& experts,
                 const VllmServing& serving, Problems& problems) {
  OptionValues options{{"act", activation_of(config)}, {"gate-up", "halves"}};
  if (quantisation.any) options["scales"] = "block";
  problems.add("moe-ffn", quantisation.any ? DType::fp8 : DType::bf16,
               {{"d", config.whole({"hidden_size"})},
                {"h", slice("features of an expert", experts.h, serving.tensor_parallel)},
                {"experts", experts.count},
                {"top-k", experts.choices}},
               options, "m", Batches::both);
}

void add_layers(const Config& config, const std::optional<Experts>& experts,
                const VllmServing& serving, Problems& problems) {
  const Architecture architecture = architecture_of(architecture_name(config));
  const std::int64_t devices = serving.tensor_parallel;
  const std::int64_t d = config.whole({"hidden_size"});
  const std::int64_t all_heads = config.whole({"num_attention_heads"});
  const std::int64_t all_kv_heads =
      config.whole_if_any({"num_key_value_heads"}).value_or(all_heads);
  const std::int64_t heads = slice("heads", all_heads, devices);
  // Devices have copies of those that are fewer than they.
  const std::int64_t kv_heads =
      all_kv_heads < devices ? 1 : slice("heads of k and v", all_kv_heads, devices);
  const auto own_dim = config.whole_if_any({"head_dim"});
  if (!own_dim && d % all_heads != 0)
    fail(fmt::format("head_dim is missing, and hidden_size={} is no multiple of {} heads", d,
                     all_heads));
  const std::int64_t dim = own_dim.value_or(d / all_heads);
  const bool one = devices == 1;

  const bool attention_bias = config.flag("attention_bias");
  const auto yes = [](bool holds) { return holds ? "yes" : "no"; };
  const JsonValue* const dense = config.find("mlp_only_layers");
  const auto* const dense_layers = dense ? dense->get_if<JsonValue::Array>() : nullptr;
  const bool all_are_mixtures = experts && !(dense_layers && !dense_layers->empty()) &&
                                config.whole_if_any({"decoder_sparse_step"}).value_or(1) == 1;
  const bool prompts =
      serving.prompts || serving.batch_invariant || (all_are_mixtures && one && serving.experts);
  // A sum over devices lies between the product and the residual.
  const Batches batches = prompts ? Batches::both : Batches::decoding;
  problems.add("rmsnorm", DType::bf16, {{"d", d}}, {}, "m", batches);
  if (!one || experts)
    problems.add("rmsnorm", DType::bf16, {{"d", d}}, {{"residual", "yes"}}, "m", batches);
  const bool qwen3 = architecture == Architecture::qwen3 || architecture == Architecture::qwen3_moe;
  problems.add("qkv", DType::bf16,
               {{"d", d}, {"heads", heads}, {"kv-heads", kv_heads}, {"dim", dim}},
               {{"weights", "packed"},
                {"bias", yes(attention_bias || architecture == Architecture::qwen2)},
                {"norm", yes(qwen3)},
                {"rotation", "halves"},
                {"cache", "yes"},
                {"slots", "i64"}},
               "m", batches);
  const std::int64_t most =
      serving.max_model_len > 0 ? serving.max_model_len : config.whole({"max_position_embeddings"});
  const std::int64_t blocks = (most + serving.block_size - 1) / serving.block_size;
  Sizes attention{{"heads", heads},
                  {"kv-heads", kv_heads},
                  {"dim", dim},
                  {"kv", blocks * serving.block_size},
                  {"page", serving.block_size}};
  if (prompts && serving.tokens.empty())
    problems.add("attention", DType::bf16, attention,
                 {{"lengths", "yes"}, {"layout", "thd"}, {"mask", "causal"}}, "s",
                 Batches::prompts);
  attention["s"] = 1;
  problems.add("attention", DType::bf16, attention, {{"lengths", "yes"}}, "b");
  // The bias of the output product is the first device's.
  const bool out_bias = attention_bias && architecture == Architecture::llama;
  for (const bool bias : {false, true})
    if (bias ? out_bias : !(one && out_bias))
      problems.add("linear", DType::bf16, {{"k", heads * dim}, {"n", d}},
                   {{"residual", yes(one)}, {"bias", yes(bias)}}, "m", batches);
  if (experts && one) {
    // The router, and what chooses the experts of each token. Slices have vLLM's.
    problems.add("linear", DType::bf16, {{"k", d}, {"n", experts->count}}, {}, "m", batches);
    problems.add("moe-route", DType::bf16,
                 {{"experts", experts->count}, {"top-k", experts->choices}},
                 {{"renormalise", yes(config.flag("norm_topk_prob"))}}, "m", batches);
  }
  if (all_are_mixtures) return;
  const std::int64_t h =
      slice("features of the network", config.whole({"intermediate_size"}), devices);
  OptionValues network;
  if (one) network = {{"norm", "rms"}, {"residual", "yes"}};
  problems.add("ffn", DType::bf16, {{"d", d}, {"h", h}}, network, "m", batches);
  // A part of the op layer, whose norm is a part of its own; it is not batch-invariant.
  if (one && !serving.batch_invariant)
    problems.add("ffn", DType::bf16, {{"d", d}, {"h", h}}, {{"residual", "yes"}});
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
  const Config root(config);
  const std::string name = architecture_name(root);
  // In a model with vision, the part for text.
  const JsonValue* const text = root.find("text_config");
  const Config model(text ? *text : config);
  const Quantisation quantisation = quantisation_of(root);
  VllmProblems result;
  Problems problems(catalog, serving, kind);
  const auto experts = experts_of(model);
  const auto unless = [&](const char* part, const std::string& why, const auto& add) {
    if (why.empty())
      add();
    else
      result.left_alone.push_back(fmt::format("{} stay vLLM's: {}", part, why));
  };
  if (serving.layers)
    unless("layers", why_not_layers(root, quantisation),
           [&] { add_layers(model, experts, serving, problems); });
  if (serving.experts && experts)
    unless("experts", why_not_experts(model, quantisation, *experts, serving.tensor_parallel),
           [&] { add_experts(model, quantisation, *experts, serving, problems); });
  else if (serving.experts && !serving.layers)
    result.left_alone.push_back(fmt::format("{} has no experts", name));
  result.ops = std::move(problems).ops();
  if (result.ops.empty())
    fail(fmt::format("there is nothing to search: {}", fmt::join(result.left_alone, "; ")));
  return result;
}

}  // namespace fftune::tool
