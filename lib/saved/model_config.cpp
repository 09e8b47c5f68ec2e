#include "saved/model_config.hpp"

#include <algorithm>
#include <cstddef>
#include <string_view>

#include "store/json.hpp"

namespace fftune {
namespace {

/// A member that is an object; null if there is none.
const JsonValue* object_in(const JsonValue& parent, std::string_view name) {
  const JsonValue* const found = parent.find(name);
  return found != nullptr && found->get_if<JsonValue::Object>() ? found : nullptr;
}

}  // namespace

std::vector<const JsonValue*> language_configs(const JsonValue& root) {
  std::vector<const JsonValue*> levels{&root};
  // A thinker is the part of a model that speaks which writes; it has a part for text.
  constexpr std::string_view parts[] = {"text_config", "thinker_config", "llm_config",
                                        "language_config"};
  for (bool found = true; found;) {
    found = false;
    for (const std::string_view part : parts)
      if (const JsonValue* const inner = object_in(*levels.back(), part)) {
        levels.push_back(inner);
        found = true;
        break;
      }
  }
  return levels;
}

const JsonValue* find_in(const std::vector<const JsonValue*>& configs, std::string_view name) {
  for (auto config = configs.rbegin(); config != configs.rend(); ++config) {
    const JsonValue* found = *config;
    for (std::size_t begin = 0; found != nullptr && begin <= name.size();) {
      const std::size_t end = std::min(name.find('.', begin), name.size());
      found = found->find(name.substr(begin, end - begin));
      begin = end + 1;
    }
    if (found != nullptr && found->get_if<std::nullptr_t>() == nullptr) return found;
  }
  return nullptr;
}

const JsonValue* quantisation_config(const JsonValue& root) {
  for (const std::string_view name : {"quantization_config", "compression_config"})
    for (const JsonValue* const level : language_configs(root))
      if (const JsonValue* const found = object_in(*level, name)) return found;
  return nullptr;
}

}  // namespace fftune
