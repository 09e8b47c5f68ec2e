// A configuration: named parameters in a fixed order, each a number or a word, as in
// "schedule=pingpong,bm=128,stages=4".
#pragma once

#include <compare>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace fftune {

/// An integer, or an enumerator that converts to one.
template <typename Number>
concept WholeNumber = std::integral<Number> ||
    (std::is_enum_v<Number>&& std::is_convertible_v<Number, std::int64_t>);

/// The value of a parameter. Numbers are ordered and have distances; words name alternatives that
/// have neither, such as the schedules of a kernel.
class ParameterValue {
 public:
  template <WholeNumber Number>
  ParameterValue(Number number) : data_(static_cast<std::int64_t>(number)) {}
  ParameterValue(std::string word) : data_(std::move(word)) {}
  ParameterValue(std::string_view word) : data_(std::string(word)) {}
  ParameterValue(const char* word) : data_(std::string(word)) {}

  bool is_word() const { return std::holds_alternative<std::string>(data_); }
  /// Each throws Error(internal) if the value is the other kind.
  std::int64_t number() const;
  const std::string& word() const;

  std::string text() const;

  /// Numbers come before words.
  auto operator<=>(const ParameterValue&) const = default;
  bool operator==(const ParameterValue&) const = default;

 private:
  std::variant<std::int64_t, std::string> data_;
};

class Config {
 public:
  using Entry = std::pair<std::string, ParameterValue>;

  Config() = default;
  Config(std::initializer_list<Entry> entries) : entries_(entries) {}

  /// Parses text(). A word begins with a letter and goes on with letters, digits, '_' and '-'.
  /// Throws Error(invalid_input) naming the part that is neither name=integer nor name=word.
  static Config parse(std::string_view text);

  /// The number that a parameter holds; throws Error(internal) if there is no parameter of that
  /// name or it holds a word.
  std::int64_t at(std::string_view name) const;
  /// The same as an int, for the many parameters that are small.
  int get(std::string_view name) const { return static_cast<int>(at(name)); }
  /// The word that a parameter holds; throws Error(internal) if there is no parameter of that name
  /// or it holds a number.
  const std::string& word(std::string_view name) const;
  /// The value, of either kind; throws Error(internal) if there is no parameter of that name.
  const ParameterValue& value(std::string_view name) const;
  bool contains(std::string_view name) const;
  /// Changes the parameter, or appends it.
  void set(std::string_view name, ParameterValue value);

  const std::vector<Entry>& entries() const { return entries_; }
  std::string text() const;

  auto operator<=>(const Config&) const = default;

 private:
  std::vector<Entry> entries_;
};

/// Whether the text could be the word of a parameter, as Config::parse reads it.
bool is_parameter_word(std::string_view text);

}  // namespace fftune
