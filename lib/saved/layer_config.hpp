// Facts of one layer of a saved model, from config.json beside it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "saved/names.hpp"

namespace fftune {
struct JsonValue;
}  // namespace fftune

namespace fftune {

class LayerConfig {
 public:
  LayerConfig() = default;
  LayerConfig(const JsonValue& root, std::int64_t layer);

  /// The word or number of the first of the field's keys that there is, in this project's words.
  /// A key that is not there has the value that transformers gives it in this kind of model.
  std::optional<std::string> value(const ConfigField& field) const;

  /// The key that value() is of; empty if there is none.
  std::string_view key(const ConfigField& field) const;

  /// Why the op layer does not compute a layer of this model, one line that names the key of
  /// config.json; empty where it does.
  const std::string& refusal() const { return refusal_; }

 private:
  using Configs = std::vector<const JsonValue*>;

  std::string word(std::string_view key) const;
  std::optional<double> number(std::string_view key) const;
  /// The members of an object whose keys have no value yet; null is a value: none.
  void take(const JsonValue& object);
  /// Names that mean something else in this kind of model, or nothing.
  void keep_own_names(const std::string& model);
  void take_angles(const Configs& configs, const std::string& type);
  void derive();
  /// "sliding_attention" or "full_attention" in a layer with a window or without one; "" where the
  /// list of types has another word.
  std::string layer_type(const Configs& configs, const std::string& model,
                         std::int64_t layer) const;
  std::string why_not(const std::string& model, const std::string& type) const;

  std::map<std::string, std::string, std::less<>> values_;
  std::string refusal_;
};

/// A whole number of at least 1; nothing if the text is none.
std::optional<std::int64_t> whole_number(const std::string& text);

}  // namespace fftune
