#include "core/config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "core/error.hpp"

namespace fftune {
namespace {

template <typename Entries>
auto find(Entries& entries, std::string_view name) {
  return std::find_if(entries.begin(), entries.end(),
                      [&](const auto& entry) { return entry.first == name; });
}

// Not std::isalpha: a locale must not decide what a file means.
bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

std::optional<ParameterValue> parse_value(std::string_view text) {
  std::int64_t number = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (!text.empty() && code == std::errc() && end == text.data() + text.size()) return number;
  if (is_parameter_word(text)) return text;
  return std::nullopt;
}

}  // namespace

bool is_parameter_word(std::string_view text) {
  return !text.empty() && is_letter(text.front()) &&
         std::all_of(text.begin(), text.end(),
                     [](char c) { return is_letter(c) || is_digit(c) || c == '_' || c == '-'; });
}

std::int64_t ParameterValue::number() const {
  if (const auto* number = std::get_if<std::int64_t>(&data_)) return *number;
  throw Error(ErrorKind::internal, fmt::format("'{}' is a word, not a number", text()));
}

const std::string& ParameterValue::word() const {
  if (const auto* word = std::get_if<std::string>(&data_)) return *word;
  throw Error(ErrorKind::internal, fmt::format("{} is a number, not a word", text()));
}

std::string ParameterValue::text() const {
  if (const auto* word = std::get_if<std::string>(&data_)) return *word;
  return fmt::format("{}", std::get<std::int64_t>(data_));
}

Config Config::parse(std::string_view text) {
  Config config;
  while (!text.empty()) {
    const auto part = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), part.size() + 1));
    const auto equals = part.find('=');
    const auto value = equals == part.npos ? std::nullopt : parse_value(part.substr(equals + 1));
    if (equals == 0 || !value)
      throw Error(
          ErrorKind::invalid_input,
          fmt::format("'{}' is not a parameter: write name=integer or name=word, as in bm=128 or "
                      "schedule=pingpong",
                      part));
    config.set(part.substr(0, equals), *value);
  }
  return config;
}

const ParameterValue& Config::value(std::string_view name) const {
  const auto entry = find(entries_, name);
  if (entry == entries_.end())
    throw Error(ErrorKind::internal, fmt::format("no parameter '{}' in '{}'", name, text()));
  return entry->second;
}

std::int64_t Config::at(std::string_view name) const {
  const auto& value = this->value(name);
  if (value.is_word())
    throw Error(ErrorKind::internal,
                fmt::format("parameter '{}' is a word, not a number, in '{}'", name, text()));
  return value.number();
}

const std::string& Config::word(std::string_view name) const {
  const auto& value = this->value(name);
  if (!value.is_word())
    throw Error(ErrorKind::internal,
                fmt::format("parameter '{}' is a number, not a word, in '{}'", name, text()));
  return value.word();
}

bool Config::contains(std::string_view name) const {
  return find(entries_, name) != entries_.end();
}

void Config::set(std::string_view name, ParameterValue value) {
  const auto entry = find(entries_, name);
  if (entry == entries_.end())
    entries_.emplace_back(name, std::move(value));
  else
    entry->second = std::move(value);
}

std::string Config::text() const {
  std::string text;
  for (const auto& [name, value] : entries_)
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", name, value.text());
  return text;
}

}  // namespace fftune
