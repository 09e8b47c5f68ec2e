// A JSON document as a value, and its text; nlohmann/json stays behind json_value.cpp.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
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

/// The version of nlohmann/json: "3.11.2".
std::string json_library_version();

/// A brief form of the value for a complaint: "12", "\"x\"", "an array"; one short printable line.
std::string json_brief(const JsonValue& value);
/// `text` in printable ASCII on one line, cut to `limit` characters: fit for an error message.
std::string printable(std::string_view text, std::size_t limit = 80);

// Reading what this program wrote itself. Every call throws Error(invalid_input).

const JsonValue& member(const JsonValue& object, std::string_view key);
const JsonValue::Array& items_of(const JsonValue& array);
[[noreturn]] void not_as_expected(const JsonValue& value, std::string_view what);

/// The value as T: bool, an integer that T holds, a double, text, or a container of these.
template <typename T>
T value_as(const JsonValue& value) {
  if constexpr (std::same_as<T, bool> || std::same_as<T, std::string>) {
    if (const auto* same = value.get_if<T>()) return *same;
    not_as_expected(value, std::same_as<T, bool> ? "true or false" : "text");
  } else if constexpr (std::integral<T> || std::floating_point<T>) {
    if (const auto* number = value.get_if<std::int64_t>()) {
      if constexpr (std::floating_point<T>)
        return static_cast<T>(*number);
      else if (std::in_range<T>(*number))
        return static_cast<T>(*number);
    }
    if (const auto* number = value.get_if<std::uint64_t>()) {
      if constexpr (std::floating_point<T>)
        return static_cast<T>(*number);
      else if (std::in_range<T>(*number))
        return static_cast<T>(*number);
    }
    if constexpr (std::floating_point<T>)
      if (const auto* number = value.get_if<double>()) return *number;
    not_as_expected(value, std::integral<T> ? "a whole number in its range" : "a number");
  } else {
    T all;
    for (const JsonValue& item : items_of(value))
      all.insert(all.end(), value_as<typename T::value_type>(item));
    return all;
  }
}

template <typename T>
T field_as(const JsonValue& object, std::string_view key) {
  return value_as<T>(member(object, key));
}
template <typename T>
T field_or(const JsonValue& object, std::string_view key, T if_missing) {
  const JsonValue* const found = object.find(key);
  return found == nullptr ? if_missing : value_as<T>(*found);
}
template <typename T>
void read_field(const JsonValue& object, std::string_view key, T& to) {
  to = field_as<T>(object, key);
}

// Reading an object's fields, each wrong one named: "verdict.median_us: expected …, found …".

/// Fit for an op, a family, a parameter, a folder: letters, digits, '_', '-' and '.', the first
/// neither '-' nor '.'. Names become parts of paths, ids and command lines.
bool is_name(std::string_view text);

/// Every call throws Error(invalid_input) with one line that names the field by its path from the
/// record on, what was expected, and what was found. A key that nobody asks for, and one that is
/// there twice, is wrong too: it is more likely a slip than a wish to be ignored.
class FieldReader {
 public:
  /// `where` is the object's own path; empty for the outermost.
  FieldReader(const JsonValue& object, std::string where);

  /// Whether the key is there: for the few that may be left out.
  bool has(std::string_view key) const;
  const JsonValue& at(std::string_view key);
  const std::string& text(std::string_view key);
  const std::string& nonempty_text(std::string_view key);
  /// Text that is_name().
  const std::string& name(std::string_view key);
  /// The value of an option: a number, which parse_number() reads, or text that is_name(), which a
  /// value may follow after a ':', as in a pattern or a routing: anything printable.
  const std::string& choice(std::string_view key);
  bool boolean(std::string_view key);
  /// Finite, and at least 0; `positive`: above 0.
  double number(std::string_view key, bool positive = false);
  std::int64_t integer(std::string_view key, std::int64_t least, std::int64_t most);
  int count(std::string_view key) {
    return static_cast<int>(integer(key, 0, std::numeric_limits<int>::max()));
  }
  std::uint64_t unsigned_integer(std::string_view key);
  const JsonValue::Array& array(std::string_view key);
  /// An array of strings that are not empty and differ.
  std::vector<std::string> names(std::string_view key);

  /// The members not asked for so far.
  JsonValue::Object rest() const;
  /// Throws if there is any.
  void finish() const;

  std::string path(std::string_view key) const;
  [[noreturn]] void expected(std::string_view key, std::string_view what,
                             const JsonValue& found) const;
  /// The key itself is wrong.
  [[noreturn]] void expected_name(std::string_view key) const;

 private:
  const JsonValue::Object* object_;
  std::string where_;
  std::vector<std::string_view> asked_;
};

}  // namespace fftune
