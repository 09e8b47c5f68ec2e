// Facts of one layer of a saved model, from config.json beside it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "apps/fftune/saved/saved_names.hpp"

namespace fftune {
struct JsonValue;
}  // namespace fftune

namespace fftune::tool {

class SavedConfig {
 public:
  SavedConfig() = default;
  SavedConfig(const JsonValue& root, std::int64_t layer);

  /// The word or number of the first of the field's keys that there is, in this project's words.
  std::optional<std::string> value(const ConfigField& field) const;

 private:
  /// "sliding_attention" or "full_attention": newer configurations have a list, in older ones it
  /// follows from the kind of model.
  std::string layer_type(const JsonValue& part, std::int64_t layer) const;

  std::map<std::string, std::string, std::less<>> values_;
};

/// A whole number of at least 1; nothing if the text is none.
std::optional<std::int64_t> whole_number(const std::string& text);

}  // namespace fftune::tool
