// A JSON document as a value, and its text; nlohmann/json stays behind json_value.cpp.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace fftune {

struct JsonValue {
  struct Member;
  using Array = std::vector<JsonValue>;
  /// In the order of the text, and with every key that it has, so that a repeated one is seen.
  using Object = std::vector<std::pair<std::string, JsonValue>>;

  /// An integer that fits is an int64, one up to 2^64 - 1 an uint64, any other number a double.
  std::variant<std::nullptr_t, bool, std::int64_t, std::uint64_t, double, std::string, Array,
               Object>
      data = nullptr;

  JsonValue() = default;
  JsonValue(std::nullptr_t) {}
  JsonValue(const char* text) : data(std::string(text)) {}
  JsonValue(std::string_view text) : data(std::string(text)) {}
  JsonValue(std::string text) : data(std::move(text)) {}
  JsonValue(Array items) : data(std::move(items)) {}
  JsonValue(Object members) : data(std::move(members)) {}
  /// An object: {{"op", "ffn"}, {"tokens", 64}}.
  JsonValue(std::initializer_list<Member> members);

  template <typename Number>
  requires std::integral<Number> || std::floating_point<Number> JsonValue(Number number) {
    if constexpr (std::same_as<Number, bool> || std::floating_point<Number>)
      data = number;
    else if (std::unsigned_integral<Number> && static_cast<std::int64_t>(number) < 0)
      data = static_cast<std::uint64_t>(number);
    else
      data = static_cast<std::int64_t>(number);
  }
  /// null where there is none.
  template <typename T>
  JsonValue(const std::optional<T>& value) : JsonValue(value ? JsonValue(*value) : JsonValue()) {}
  /// An array of the range's elements.
  template <typename Range>
  requires(!std::convertible_to<Range, std::string_view>) && requires(const Range& range) {
    JsonValue(*range.begin());
    range.end();
  }
  JsonValue(const Range& range) : data(Array(range.begin(), range.end())) {}

  /// An object of the map's entries.
  template <typename Map>
  requires requires(const Map& map) {
    std::string_view(map.begin()->first);
    JsonValue(map.begin()->second);
  }
  JsonValue(const Map& map) : data(Object(map.begin(), map.end())) {}

  template <typename T>
  const T* get_if() const {
    return std::get_if<T>(&data);
  }
  /// The first member of that name; null if there is none or this is no object.
  const JsonValue* find(std::string_view key) const;
  /// The member of that name, added where there is none. For an object, or null, which becomes one.
  JsonValue& operator[](std::string_view key);
  /// Adds an element. For an array, or null, which becomes one.
  void push_back(JsonValue item);
  /// Elements or members; 0 for anything else.
  std::size_t size() const;
};

struct JsonValue::Member {
  std::string_view name;
  JsonValue value;
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
