#include "apps/fftune/search/vllm_model.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/error.hpp"

namespace fftune::tool::vllm {
namespace {

constexpr std::int64_t most_size = std::int64_t{1} << 30;  // of a configuration

/// The settings of integers in an object of the configuration.
Quantisation integers_of(const Config& own, std::string name, bool symmetric) {
  Quantisation found{.kind = Quantisation::Kind::integers, .name = std::move(name)};
  found.bits = own.integer_if_any({"bits", "w_bit", "num_bits"}).value_or(0);
  found.zeros = !symmetric;
  const JsonValue* const group = own.find("group_size");
  const auto* const size = group ? group->get_if<std::int64_t>() : nullptr;
  found.group = size != nullptr && *size > 0 ? *size : 0;
  found.ordered = own.flag({"desc_act"});
  if (found.bits == 0)
    found.unfit = "weights of an unknown number of bits";
  else if (!(found.bits == 4 || (found.bits == 8 && symmetric)))
    found.unfit =
        fmt::format("weights of {} bits{}", found.bits, symmetric ? "" : " with zero points");
  else if (found.group != 0 && found.group != 32 && found.group != 64 && found.group != 128)
    found.unfit = fmt::format("groups of {} inputs", found.group);
  return found;
}

bool is_block(const JsonValue* field) {
  const auto* const extents = field ? field->get_if<JsonValue::Array>() : nullptr;
  return extents != nullptr && extents->size() == 2 &&
         std::all_of(extents->begin(), extents->end(), [](const JsonValue& extent) {
           const auto* const value = extent.get_if<std::int64_t>();
           return value != nullptr && *value == scale_block;
         });
}

/// compressed-tensors: the weights of its groups of layers, if these are alike.
Quantisation compressed_of(const Config& own) {
  Quantisation found{.kind = Quantisation::Kind::other, .name = "compressed-tensors"};
  const JsonValue* const groups = own.find("config_groups");
  const auto* const all = groups ? groups->get_if<JsonValue::Object>() : nullptr;
  if (all == nullptr || all->empty()) return found;
  std::set<std::string> kinds;
  for (const auto& [name, group] : *all) {
    const JsonValue* const weights = group.find("weights");
    if (weights == nullptr) return found;
    kinds.insert(json_line(*weights));
  }
  found.differs = kinds.size() > 1;
  if (found.differs) return found;
  const JsonValue& group = all->front().second;
  const Config weights({group.find("weights")});
  const JsonValue* const inputs = group.find("input_activations");
  const bool rounds = inputs != nullptr && inputs->get_if<JsonValue::Object>();
  const std::string type = weights.text({"type"}, "int");
  if (type == "int" && !rounds)
    return integers_of(weights, found.name, weights.flag({"symmetric"}, true));
  if (type != "float" || !rounds || weights.integer_if_any({"num_bits"}).value_or(8) != 8)
    return found;
  if (is_block(weights.find("block_structure")))
    found.kind = Quantisation::Kind::fp8_blocks;
  else if (Config({inputs}).flag({"dynamic"}))
    found.kind = Quantisation::Kind::fp8_tokens;
  return found;
}

struct KnownArchitecture {
  std::string_view name, type;  // in architectures, and as the model_type of a part for text
  Architecture architecture = Architecture::other;
};
constexpr KnownArchitecture known_architectures[] = {
    {"LlamaForCausalLM", "llama", Architecture::llama},
    {"MistralForCausalLM", "mistral", Architecture::mistral},
    {"Qwen2ForCausalLM", "qwen2", Architecture::qwen2},
    {"Qwen3ForCausalLM", "qwen3", Architecture::qwen3},
    {"Qwen3MoeForCausalLM", "qwen3_moe", Architecture::qwen3_moe},
    {"GptOssForCausalLM", "gpt_oss", Architecture::gpt_oss},
    {"Gemma2ForCausalLM", "gemma2", Architecture::gemma2},
    {"Gemma3ForCausalLM", "gemma3_text", Architecture::gemma3},
    {"Qwen3NextForCausalLM", "qwen3_next", Architecture::with_states},
    {"Qwen3_5ForCausalLM", "qwen3_5_text", Architecture::with_states},
    {"Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", Architecture::with_states}};

std::optional<std::string> architecture_in(const JsonValue& level) {
  const JsonValue* const all = level.find("architectures");
  const auto* const names = all ? all->get_if<JsonValue::Array>() : nullptr;
  const auto* const name =
      names && !names->empty() ? names->front().get_if<std::string>() : nullptr;
  return name == nullptr ? std::nullopt : std::optional(*name);
}

}  // namespace

[[noreturn]] void fail(const std::string& why) {
  throw Error(ErrorKind::invalid_input, why);
}

std::pair<std::string_view, const JsonValue*> Config::first(const Names& names) const {
  for (const std::string_view name : names)
    if (const JsonValue* const found = find(name)) return {name, found};
  return {"", nullptr};
}

std::optional<std::int64_t> Config::integer_if_any(const Names& names) const {
  const auto [name, found] = first(names);
  if (found == nullptr) return std::nullopt;
  return number(name, *found);
}

std::int64_t Config::integer(const Names& names) const {
  if (const auto found = integer_if_any(names)) return *found;
  fail(fmt::format("{} is missing: give the config.json of a language model", names.front()));
}

std::vector<std::int64_t> Config::integers(const Names& names) const {
  const auto [name, found] = first(names);
  if (found == nullptr) return {};
  const auto* const list = found->get_if<JsonValue::Array>();
  if (list == nullptr) return {number(name, *found)};
  std::vector<std::int64_t> all;
  for (const JsonValue& each : *list) all.push_back(number(name, each));
  return all;
}

bool Config::flag(const Names& names, bool otherwise) const {
  const auto [name, found] = first(names);
  if (found == nullptr) return otherwise;
  if (const bool* const value = found->get_if<bool>()) return *value;
  fail(fmt::format("{}: expected true or false, found {}", name, json_brief(*found)));
}

std::string Config::text(const Names& names, std::string otherwise) const {
  const auto [name, found] = first(names);
  if (found == nullptr) return otherwise;
  if (const auto* const value = found->get_if<std::string>()) return *value;
  fail(fmt::format("{}: expected a text, found {}", name, json_brief(*found)));
}

std::int64_t Config::number(std::string_view name, const JsonValue& found) {
  const auto* const value = found.get_if<std::int64_t>();
  if (value == nullptr || *value < 1 || *value > most_size)
    fail(fmt::format("{}: expected a whole number from 1 to {}, found {}", name, most_size,
                     json_brief(found)));
  return *value;
}

std::int64_t slice(std::string_view what, std::int64_t whole, std::int64_t devices) {
  if (whole % devices != 0)
    fail(fmt::format("--tp {} does not divide {} {}", devices, whole, what));
  return whole / devices;
}

Quantisation quantisation_of(const Config& config) {
  const JsonValue* const found = quantisation_config(config.root());
  if (found == nullptr) {
    const auto [name, other] = config.first({"quantization_config", "compression_config"});
    if (other != nullptr)
      fail(fmt::format("{}: expected an object, found {}", name, json_brief(*other)));
    return {};
  }
  const Config own({found});
  const std::string method = own.text({"quant_method"}, "an unknown method");
  if (method == "gptq") {
    Quantisation integers = integers_of(own, method, own.flag({"sym"}, true));
    // vLLM's kernels have no zero points of GPTQ.
    if (integers.zeros && integers.unfit.empty()) integers.unfit = "zero points of gptq";
    const JsonValue* const dynamic = own.find("dynamic");
    integers.differs = dynamic != nullptr && dynamic->size() > 0;
    return integers;
  }
  if (method == "awq") return integers_of(own, method, !own.flag({"zero_point"}, true));
  if (method == "compressed-tensors") return compressed_of(own);
  Quantisation other{.kind = Quantisation::Kind::other, .name = method};
  if (method == "fp8" && is_block(own.find("weight_block_size")))
    other.kind = Quantisation::Kind::fp8_blocks;
  else if (method == "fp8" && own.find("weight_block_size") == nullptr &&
           own.text({"activation_scheme"}, "dynamic") == "dynamic")
    other.kind = Quantisation::Kind::fp8_tokens;
  if (method == "mxfp4") other.kind = Quantisation::Kind::mxfp4;
  return other;
}

bool is_fp8(const Quantisation& quantisation) {
  return quantisation.kind == Quantisation::Kind::fp8_blocks ||
         quantisation.kind == Quantisation::Kind::fp8_tokens;
}

bool is_gemma(Architecture architecture) {
  return architecture == Architecture::gemma2 || architecture == Architecture::gemma3;
}

std::string architecture_name(const Config& config) {
  for (const JsonValue* const level : {&config.root(), &config.innermost()})
    if (const auto name = architecture_in(*level)) return *name;
  fail("architectures is missing: give the config.json of a model as it is saved");
}

Architecture architecture_of(const Config& config) {
  const std::string root = architecture_name(config);
  const bool is_part = &config.root() != &config.innermost();
  const std::string inner = is_part ? architecture_in(config.innermost()).value_or("") : "";
  const auto* const field = is_part ? config.innermost().find("model_type") : nullptr;
  const auto* const type = field ? field->get_if<std::string>() : nullptr;
  for (const std::string& name : {root, inner})
    for (const KnownArchitecture& known : known_architectures)
      if (known.name == name) return known.architecture;
  if (type != nullptr && inner.empty())
    for (const KnownArchitecture& known : known_architectures)
      if (known.type == *type) return known.architecture;
  return Architecture::other;
}

std::string element_type(const Config& config) {
  const std::string name = config.from_outside().text({"dtype", "torch_dtype"}, "float32");
  const std::string type = config.text({"model_type"}, "");
  // vLLM has these in no float16.
  constexpr std::string_view unstable[] = {"gemma2", "gemma3", "gemma3_text", "glm4"};
  const bool is_unstable =
      std::find(std::begin(unstable), std::end(unstable), type) != std::end(unstable);
  return name == "float32" || (name == "float16" && is_unstable) ? "bfloat16" : name;
}

std::vector<Experts> experts_of(const Config& config) {
  const auto counts = config.integers(config_names::experts);
  // Gemma 4 has the fields in dense models too. One expert is a network.
  if (counts.empty() || *std::max_element(counts.begin(), counts.end()) == 1 ||
      !config.flag({"enable_moe_block"}, true) || !config.flag({"is_moe"}, true))
    return {};
  const auto choices = config.integers(config_names::experts_per_token);
  if (choices.empty())
    fail(fmt::format("{} is missing: it is the number of experts for a token",
                     fmt::join(config_names::experts_per_token, " or ")));
  auto widths = config.integers(config_names::expert_features);
  if (widths.empty()) widths = {config.integer(config_names::network_features)};
  const std::int64_t d = config.integer_if_any(config_names::expert_inputs)
                             .value_or(config.integer(config_names::features));
  std::vector<Experts> all;
  for (std::size_t i = 0; i < std::max({counts.size(), choices.size(), widths.size()}); ++i) {
    const auto at = [&](const std::vector<std::int64_t>& values) {
      return values[std::min(i, values.size() - 1)];
    };
    const Experts kind{at(counts), at(choices), d, at(widths)};
    if (std::find(all.begin(), all.end(), kind) == all.end()) all.push_back(kind);
  }
  return all;
}

std::string activation_word(const Config& config) {
  return config.text(config_names::activation, "silu");
}

std::string activation_of(const Config& config) {
  static const std::map<std::string, std::string> known{{"silu", "silu"},
                                                        {"swish", "silu"},
                                                        {"gelu", "gelu"},
                                                        {"gelu_pytorch_tanh", "gelu-tanh"},
                                                        {"gelu_tanh", "gelu-tanh"}};
  const auto found = known.find(activation_word(config));
  return found == known.end() ? "" : found->second;
}

bool has_any(const Config& config, const Names& names) {
  return config.first(names).second != nullptr;
}

bool is_gpt_oss(const Config& config) {
  return config.text({"model_type"}, "") == "gpt_oss";
}

std::vector<std::int64_t> windows_of(const Config& config, Architecture architecture) {
  const bool is_qwen = architecture == Architecture::qwen2 || architecture == Architecture::qwen3 ||
                       architecture == Architecture::qwen3_moe;
  const auto window = config.integer_if_any(config_names::window);
  if (!window || !config.flag({"use_sliding_window"}, !is_qwen)) return {0};
  const JsonValue* const types = config.find("layer_types");
  const auto* const all = types ? types->get_if<JsonValue::Array>() : nullptr;
  if (all == nullptr) {
    const bool mixes = is_qwen || is_gemma(architecture) || architecture == Architecture::gpt_oss;
    return mixes ? std::vector<std::int64_t>{0, *window} : std::vector{*window};
  }
  std::set<std::int64_t> found;
  for (const JsonValue& each : *all) {
    const auto* const text = each.get_if<std::string>();
    found.insert(text != nullptr && *text != "sliding_attention" ? 0 : *window);
  }
  return {found.begin(), found.end()};
}

LayerSizes sizes_of(const Config& config, std::int64_t devices) {
  const std::int64_t d = config.integer(config_names::features);
  const std::int64_t all_heads = config.integer(config_names::heads);
  const std::int64_t all_kv_heads =
      config.integer_if_any(config_names::kv_heads).value_or(all_heads);
  const auto own_dim = config.integer_if_any(config_names::head_features);
  if (!own_dim && d % all_heads != 0)
    fail(fmt::format("head_dim is missing, and hidden_size={} is no multiple of {} heads", d,
                     all_heads));
  // Devices have copies of those that are fewer than they.
  return {.d = d,
          .heads = slice("heads", all_heads, devices),
          .kv_heads = all_kv_heads < devices ? 1 : slice("heads of k and v", all_kv_heads, devices),
          .dim = own_dim.value_or(d / all_heads)};
}

bool has_qkv_bias(const Config& config) {
  const Architecture architecture = architecture_of(config);
  return config.flag({"attention_bias"}) || architecture == Architecture::qwen2 ||
         architecture == Architecture::gpt_oss;
}

bool has_out_bias(const Config& config) {
  const Architecture architecture = architecture_of(config);
  return architecture == Architecture::gpt_oss ||
         (config.flag({"attention_bias"}) &&
          (architecture == Architecture::llama || architecture == Architecture::mistral ||
           is_gemma(architecture)));
}

bool are_all_mixtures(const Config& config, const std::vector<Experts>& experts) {
  const JsonValue* const dense = config.find("mlp_only_layers");
  const auto* const dense_layers = dense ? dense->get_if<JsonValue::Array>() : nullptr;
  return !experts.empty() && !(dense_layers && !dense_layers->empty()) &&
         config.integer_if_any({"decoder_sparse_step"}).value_or(1) == 1;
}

}  // namespace fftune::tool::vllm
