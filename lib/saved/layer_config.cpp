#include "saved/layer_config.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "saved/model_config.hpp"
#include "store/json.hpp"

namespace fftune {
namespace {

/// The configurations' names of layers with a window and without one.
constexpr const char* sliding = "sliding_attention";
constexpr const char* full = "full_attention";

/// Keys with which transformers computes what the op layer does not, unless they have this value.
constexpr std::pair<const char*, const char*> refused_keys[] = {
    {"is_causal", "yes"},
    {"use_bidirectional_attention", "no"},
    {"attention_chunk_size", ""},
    {"qk_layernorm", "no"},
    {"add_cross_attention", "no"},
    {"scale_attn_by_inverse_layer_idx", "no"},
    {"mlp_bias", "no"}};

/// The values of transformers for keys that a configuration does not have, by model_type.
/// python/tests/test_saved_config.py compares them with its classes.
constexpr std::pair<std::string_view, const char*> defaults[] = {
    {"llama", R"({"hidden_act":"silu","rms_norm_eps":1e-06,"rope_theta":10000.0})"},
    {"mistral",
     R"({"hidden_act":"silu","rms_norm_eps":1e-06,"rope_theta":10000.0,
         "sliding_window":4096})"},
    {"qwen2",
     R"({"hidden_act":"silu","rms_norm_eps":1e-06,"rope_theta":10000.0,
         "sliding_window":4096,"use_sliding_window":false,"max_window_layers":28})"},
    {"qwen3",
     R"({"hidden_act":"silu","rms_norm_eps":1e-06,"rope_theta":10000.0,
         "head_dim":128,"sliding_window":4096,"use_sliding_window":false,
         "max_window_layers":28})"},
    {"gemma",
     R"({"hidden_act":"gelu_pytorch_tanh","rms_norm_eps":1e-06,"rope_theta":10000.0,"head_dim":256})"},
    {"gemma2",
     R"({"hidden_activation":"gelu_pytorch_tanh","rms_norm_eps":1e-06,"rope_theta":10000.0,"head_dim":256,"sliding_window":4096,
         "query_pre_attn_scalar":256,"attn_logit_softcapping":50.0,
         "final_logit_softcapping":30.0})"},
    {"gemma3_text",
     R"({"hidden_activation":"gelu_pytorch_tanh","rms_norm_eps":1e-06,"rope_theta":1000000.0,
         "rope_local_base_freq":10000.0,"head_dim":256,
         "sliding_window":4096,"query_pre_attn_scalar":256})"},
    {"phi",
     R"({"hidden_act":"gelu_new","layer_norm_eps":1e-05,"rope_theta":10000.0,
         "partial_rotary_factor":0.5})"},
    {"phi3", R"({"hidden_act":"silu","rms_norm_eps":1e-05,"rope_theta":10000.0})"},
    {"gpt2", R"({"activation_function":"gelu_new","layer_norm_epsilon":1e-05})"},
    {"mixtral",
     R"({"hidden_act":"silu","rms_norm_eps":1e-05,"rope_theta":1000000.0,"num_experts_per_tok":2})"},
    {"qwen3_moe",
     R"({"hidden_act":"silu","rms_norm_eps":1e-06,"rope_theta":10000.0,
         "sliding_window":4096,"use_sliding_window":false,"num_experts_per_tok":8,
         "norm_topk_prob":false})"}};

const char* defaults_of(std::string_view model) {
  for (const auto& [type, values] : defaults)
    if (type == model) return values;
  return "{}";
}

bool is_known(std::string_view model) {
  return defaults_of(model) != std::string_view("{}");
}

std::vector<std::string_view> known_models() {
  std::vector<std::string_view> all;
  for (const auto& entry : defaults) all.push_back(entry.first);
  return all;
}

std::optional<double> real_number(const std::string& text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end || !std::isfinite(value)) return {};
  return value;
}

}  // namespace

std::optional<std::int64_t> whole_number(const std::string& text) {
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end || value < 1) return {};
  return value;
}

std::string LayerConfig::word(std::string_view key) const {
  const auto entry = values_.find(key);
  return entry == values_.end() ? std::string() : entry->second;
}

std::optional<double> LayerConfig::number(std::string_view key) const {
  return real_number(word(key));
}

void LayerConfig::take(const JsonValue& object) {
  const auto* const fields = object.get_if<JsonValue::Object>();
  if (fields == nullptr) return;
  for (const auto& [key, value] : *fields)
    if (const auto* text = value.get_if<std::string>())
      values_.try_emplace(key, *text);
    else if (const auto* holds = value.get_if<bool>())
      values_.try_emplace(key, *holds ? "yes" : "no");
    else if (value.get_if<std::int64_t>() || value.get_if<double>())
      values_.try_emplace(key, json_line(value));
    else if (value.get_if<std::nullptr_t>())
      values_.try_emplace(key);
}

LayerConfig::LayerConfig(const JsonValue& root, std::int64_t layer) {
  const Configs configs = language_configs(root);
  const JsonValue* const kind = find_in(configs, "model_type");
  const auto* const name = kind ? kind->get_if<std::string>() : nullptr;
  const std::string model = name ? *name : "";
  const std::string type = [&] {
    // The type of the layer decides which angles are taken, and needs what the others do not.
    for (auto config = configs.rbegin(); config != configs.rend(); ++config) take(**config);
    const JsonValue defaults = parse_json(defaults_of(model));
    take(defaults);
    return layer_type(configs, model, layer);
  }();
  take_angles(configs, type);
  if (type != sliding) values_.erase("sliding_window");
  keep_own_names(model);
  if (model.starts_with("gemma"))
    if (const auto features = number("hidden_size"))
      values_.try_emplace(std::string(config_embedding), fmt::format("{}", std::sqrt(*features)));
  refusal_ = why_not(model, type);
  if (const JsonValue* const own = find_in(configs, "per_layer_config"); own && own->size() > 0)
    refusal_ = "config.json has per_layer_config, which the op layer does not compute";
  std::erase_if(values_, [](const auto& entry) { return entry.second.empty(); });
  derive();
}

void LayerConfig::keep_own_names(const std::string& model) {
  const bool is_later_gemma = model == "gemma2" || model == "gemma3_text";
  if (is_later_gemma || model == "gpt2") values_.erase("hidden_act");
  if (!is_later_gemma && is_known(model)) values_.erase("hidden_activation");
  if (model == "gemma" && word("hidden_act") == "gelu")
    values_["hidden_act"] = "gelu_pytorch_tanh";  // the first checkpoints say so, and mean this
  // It has the key, and computes without it.
  if (model == "gemma3_text") values_.erase("attn_logit_softcapping");
}

/// rope_scaling, or else rope_parameters, counts before what is beside it.
void LayerConfig::take_angles(const Configs& configs, const std::string& type) {
  const bool slides = type == sliding;
  // Gemma 3, before each type of layer had angles of its own.
  const std::string local = word("rope_local_base_freq");
  for (const char* angles : {"rope_scaling", "rope_parameters"}) {
    const JsonValue* const all = find_in(configs, angles);
    if (all == nullptr || all->size() == 0) continue;
    const JsonValue* const nested = all->find(type);
    if (nested == nullptr && slides && !local.empty()) break;
    const std::map<std::string, std::string, std::less<>> others = std::exchange(values_, {});
    take(nested ? *nested : *all);
    values_.insert(others.begin(), others.end());
    return;
  }
  if (slides && !local.empty()) values_["rope_theta"] = local;
}

void LayerConfig::derive() {
  for (const auto& [d, n] : {std::pair("hidden_size", "num_attention_heads"), {"n_embd", "n_head"}})
    if (const auto features = number(d), heads = number(n); features && heads && *heads > 0)
      values_.try_emplace("head_dim", fmt::format("{:.0f}", *features / *heads));
  const auto dim = number("head_dim");
  if (const auto share = number("partial_rotary_factor"); share && dim && *share < 1)
    values_.try_emplace(std::string(config_rotary),
                        fmt::format("{:.0f}", std::floor(*dim * *share)));
  if (const auto scalar = number("query_pre_attn_scalar"); scalar && *scalar > 0)
    values_.try_emplace(std::string(config_scale), fmt::format("{}", 1 / std::sqrt(*scalar)));
  if (word("scale_attn_weights") == "no") values_.try_emplace(std::string(config_scale), "1");
}

std::string LayerConfig::layer_type(const Configs& configs, const std::string& model,
                                    std::int64_t layer) const {
  const auto type_if = [](bool slides) { return std::string(slides ? sliding : full); };
  const bool is_qwen = model.starts_with("qwen");
  const bool never = model == "llama" || model == "gemma" || model == "phi" || model == "gpt2";
  if (word("sliding_window").empty() || never || (is_qwen && word("use_sliding_window") != "yes") ||
      word("use_sliding_window") == "no")
    return type_if(false);
  const bool always =
      model == "mistral" || model == "mixtral" || model == "phi3" || model == "qwen3_moe";
  if (always) return type_if(true);
  const JsonValue* const list = find_in(configs, "layer_types");
  const auto* const types = list ? list->get_if<JsonValue::Array>() : nullptr;
  if (types != nullptr && layer < std::ssize(*types))
    if (const auto* text = (*types)[static_cast<std::size_t>(layer)].get_if<std::string>())
      return *text == sliding || *text == full ? *text : "";
  if (model == "gemma2") return type_if(layer % 2 == 0);
  if (model.starts_with("gemma3"))
    return type_if((layer + 1) % whole_number(word("sliding_window_pattern")).value_or(6) != 0);
  if (is_qwen)
    return type_if(static_cast<double>(layer) >= number("max_window_layers").value_or(28));
  return type_if(true);
}

std::string LayerConfig::why_not(const std::string& model, const std::string& type) const {
  if (!is_known(model) && !model.empty())
    return fmt::format("config.json has model_type {}, whose layers are not known: {} are", model,
                       fmt::join(known_models(), ", "));
  if (type.empty())
    return "config.json has layer_types with a word other than sliding_attention and "
           "full_attention for this layer";
  for (const auto& [key, neutral] : refused_keys)
    if (const std::string value = word(key); !value.empty() && value != neutral)
      return fmt::format("config.json has {} {}, which the op layer does not compute", key,
                         value == "yes"  ? "true"
                         : value == "no" ? "false"
                                         : value);
  const std::string angles = word(values_.contains("rope_type") ? "rope_type" : "type");
  constexpr std::string_view known[] = {"", "default", "linear", "llama3"};
  if (std::find(std::begin(known), std::end(known), angles) == std::end(known))
    return fmt::format(
        "config.json has rope_type {}, whose angles are not known: default, linear and llama3 are",
        angles);
  return "";
}

std::string_view LayerConfig::key(const ConfigField& field) const {
  for (const std::string_view each : field.keys)
    if (values_.contains(each)) return each;
  return {};
}

std::optional<std::string> LayerConfig::value(const ConfigField& field) const {
  const std::string_view own = key(field);
  if (own.empty()) return {};
  const std::string& text = values_.find(own)->second;
  for (const auto& [theirs, ours] : field.words)
    if (text == theirs) return std::string(ours);
  return std::string(our_word(text));
}

}  // namespace fftune
