// A JSON document as a value, and its text; nlohmann/json stays behind json_value.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace fftune {

struct JsonValue {
  using Array = std::vector<JsonValue>;
  /// In the order of the text, and with every key that it has, so that a repeated one is seen.
  using Object = std::vector<std::pair<std::string, JsonValue>>;

  /// An integer that fits is an int64, one up to 2^64 - 1 an uint64, any other number a double.
  std::variant<std::nullptr_t, bool, std::int64_t, std::uint64_t, double, std::string, Array,
               Object>
      data = nullptr;

  template <typename T>
  const T* get_if() const {
    return std::get_if<T>(&data);
  }
  /// The first member of that name; null if there is none or this is no object.
  const JsonValue* find(std::string_view key) const;
};

/// Throws Error(invalid_input) that says where and why the text is no JSON, on one line. Values
/// nested deeper than 32 are refused: nothing of ours is.
JsonValue parse_json(std::string_view text);

/// On one line, without a space.
std::string json_line(const JsonValue& value);
/// For people: two spaces a level, one member a line, but a container on a single line where it
/// fits. Ends in a newline.
std::string json_page(const JsonValue& value);

/// A brief form of the value for a complaint: "12", "\"x\"", "an array"; one short printable line.
std::string json_brief(const JsonValue& value);
/// `text` in printable ASCII on one line, cut to `limit` characters: fit for an error message.
std::string printable(std::string_view text, std::size_t limit = 80);

}  // namespace fftune
