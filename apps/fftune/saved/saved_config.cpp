#include "apps/fftune/saved/saved_config.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <utility>

#include "store/json.hpp"

namespace fftune::tool {
namespace {

/// The configurations' name of layers with a window.
constexpr const char* sliding = "sliding_attention";

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

SavedConfig::SavedConfig(const JsonValue& root, std::int64_t layer) {
  const auto take = [&](const JsonValue* object) {
    const auto* fields = object ? object->get_if<JsonValue::Object>() : nullptr;
    if (fields == nullptr) return;
    for (const auto& [key, value] : *fields)
      if (const auto* text = value.get_if<std::string>())
        values_.try_emplace(key, *text);
      else if (const auto* holds = value.get_if<bool>())
        values_.try_emplace(key, *holds ? "yes" : "no");
      else if (value.get_if<std::int64_t>() || value.get_if<double>())
        values_.try_emplace(key, json_line(value));
  };
  // In a model with vision, the part for text.
  for (const JsonValue* const part : {root.find("text_config"), &root}) {
    if (part == nullptr) continue;
    take(part);
    const std::string type = layer_type(*part, layer);
    const bool slides = type == sliding;
    // Gemma 3, before each type of layer had angles of its own.
    const auto local = values_.find("rope_local_base_freq");
    if (slides && local != values_.end()) values_["rope_theta"] = local->second;
    for (const char* angles : {"rope_parameters", "rope_scaling"})
      if (const JsonValue* const all = part->find(angles);
          all != nullptr && (!slides || local == values_.end())) {
        const JsonValue* const own = all->find(type);
        take(own ? own : all);
      }
    if (!slides) values_.erase("sliding_window");
  }
  const auto number = [&](std::string_view key) {
    const auto entry = values_.find(key);
    return entry == values_.end() ? std::nullopt : real_number(entry->second);
  };
  for (const auto& [d, n] : {std::pair("hidden_size", "num_attention_heads"), {"n_embd", "n_head"}})
    if (const auto features = number(d), heads = number(n); features && heads && *heads > 0)
      values_.try_emplace("head_dim", fmt::format("{:.0f}", *features / *heads));
  const auto dim = number("head_dim");
  if (const auto share = number("partial_rotary_factor"); share && dim && *share < 1)
    values_.try_emplace(std::string(config_rotary),
                        fmt::format("{:.0f}", std::floor(*dim * *share)));
  if (const auto scalar = number("query_pre_attn_scalar"); scalar && *scalar > 0)
    values_.try_emplace(std::string(config_scale), fmt::format("{}", 1 / std::sqrt(*scalar)));
}

std::string SavedConfig::layer_type(const JsonValue& part, std::int64_t layer) const {
  const auto word = [&](std::string_view key) {
    const auto entry = values_.find(key);
    return entry == values_.end() ? std::string() : entry->second;
  };
  const auto type_if = [](bool slides) { return std::string(slides ? sliding : "full_attention"); };
  if (word("sliding_window").empty()) return type_if(false);
  const JsonValue* const list = part.find("layer_types");
  const auto* types = list ? list->get_if<JsonValue::Array>() : nullptr;
  if (types != nullptr && layer < std::ssize(*types))
    if (const auto* text = (*types)[static_cast<std::size_t>(layer)].get_if<std::string>())
      return *text;
  const std::string model = word("model_type");
  if (model == "gemma2") return type_if(layer % 2 == 0);
  if (model.starts_with("gemma3"))
    return type_if((layer + 1) % whole_number(word("sliding_window_pattern")).value_or(6) != 0);
  return type_if(word("use_sliding_window") != "no");
}

std::optional<std::string> SavedConfig::value(const ConfigField& field) const {
  for (const std::string_view key : field.keys)
    if (const auto entry = values_.find(key); entry != values_.end()) {
      for (const auto& [theirs, ours] : field.words)
        if (entry->second == theirs) return std::string(ours);
      return std::string(our_word(entry->second));
    }
  return {};
}

}  // namespace fftune::tool
