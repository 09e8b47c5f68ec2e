#include "store/json.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "core/error.hpp"
#include "core/problem.hpp"

namespace fftune {
namespace {

constexpr const char* name_rule = "a name of letters, digits, '_', '-' and '.'";
constexpr const char* choice_rule =
    "a name of letters, digits, '_', '-' and '.', which a value may follow after ':', or a number";

[[noreturn]] void complain(const std::string& where, const std::string& what) {
  throw Error(ErrorKind::invalid_input, where.empty() ? what : where + ": " + what);
}

}  // namespace

bool is_name(std::string_view text) {
  if (text.empty() || text.front() == '.' || text.front() == '-') return false;
  return std::all_of(text.begin(), text.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-' || c == '.';
  });
}

FieldReader::FieldReader(const JsonValue& object, std::string where)
    : object_(object.get_if<JsonValue::Object>()), where_(std::move(where)) {
  if (!object_) complain(where_, fmt::format("expected an object, found {}", json_brief(object)));
  std::vector<std::string_view> keys;
  for (const auto& [key, value] : *object_) keys.push_back(key);
  std::sort(keys.begin(), keys.end());
  const auto repeated = std::adjacent_find(keys.begin(), keys.end());
  if (repeated != keys.end()) complain(path(*repeated), "is there twice: keep one");
}

std::string FieldReader::path(std::string_view key) const {
  const auto name = printable(key, 40);
  return where_.empty() ? name : where_ + "." + name;
}

void FieldReader::expected(std::string_view key, std::string_view what,
                           const JsonValue& found) const {
  complain(path(key), fmt::format("expected {}, found {}", what, json_brief(found)));
}

void FieldReader::expected_name(std::string_view key) const {
  complain(path(key), fmt::format("the key is not {}", name_rule));
}

bool FieldReader::has(std::string_view key) const {
  return std::any_of(object_->begin(), object_->end(),
                     [&](const auto& member) { return member.first == key; });
}

const JsonValue& FieldReader::at(std::string_view key) {
  for (const auto& [name, value] : *object_) {
    if (name != key) continue;
    asked_.push_back(name);
    return value;
  }
  complain(path(key), "is missing");
}

const std::string& FieldReader::text(std::string_view key) {
  const auto& value = at(key);
  const auto* text = value.get_if<std::string>();
  if (!text) expected(key, "a string", value);
  return *text;
}

const std::string& FieldReader::nonempty_text(std::string_view key) {
  const auto& result = text(key);
  if (result.empty()) expected(key, "a string that is not empty", at(key));
  return result;
}

const std::string& FieldReader::name(std::string_view key) {
  const auto& result = text(key);
  if (!is_name(result)) expected(key, name_rule, at(key));
  return result;
}

const std::string& FieldReader::choice(std::string_view key) {
  const std::string_view result = text(key);
  const auto colon = std::min(result.find(':'), result.size());
  // The value may be a path: anything but control characters.
  const std::string_view value = result.substr(std::min(colon + 1, result.size()));
  const bool is_printable = std::none_of(value.begin(), value.end(), [](char c) {
    return std::iscntrl(static_cast<unsigned char>(c)) != 0;
  });
  const bool has_value = colon == result.size() || (!value.empty() && is_printable);
  if (!parse_number(result) && !(is_name(result.substr(0, colon)) && has_value))
    expected(key, choice_rule, at(key));
  return text(key);
}

bool FieldReader::boolean(std::string_view key) {
  const auto& value = at(key);
  const auto* result = value.get_if<bool>();
  if (!result) expected(key, "true or false", value);
  return *result;
}

double FieldReader::number(std::string_view key, bool positive) {
  const auto& value = at(key);
  const char* what = positive ? "a number above 0" : "a number of at least 0";
  double number = 0;
  if (const auto* real = value.get_if<double>())
    number = *real;
  else if (const auto* integer = value.get_if<std::int64_t>())
    number = static_cast<double>(*integer);
  else if (const auto* large = value.get_if<std::uint64_t>())
    number = static_cast<double>(*large);
  else
    expected(key, what, value);
  if (!std::isfinite(number) || number < 0 || (positive && number == 0)) expected(key, what, value);
  return number;
}

std::int64_t FieldReader::integer(std::string_view key, std::int64_t least, std::int64_t most) {
  const auto& value = at(key);
  const auto* integer = value.get_if<std::int64_t>();
  if (!integer || *integer < least || *integer > most)
    expected(key,
             most == std::numeric_limits<std::int64_t>::max()
                 ? fmt::format("an integer of at least {}", least)
                 : fmt::format("an integer from {} to {}", least, most),
             value);
  return *integer;
}

std::uint64_t FieldReader::unsigned_integer(std::string_view key) {
  const auto& value = at(key);
  if (const auto* large = value.get_if<std::uint64_t>()) return *large;
  const auto* integer = value.get_if<std::int64_t>();
  if (!integer || *integer < 0) expected(key, "an integer from 0 to 2^64 - 1", value);
  return static_cast<std::uint64_t>(*integer);
}

const JsonValue::Array& FieldReader::array(std::string_view key) {
  const auto& value = at(key);
  const auto* result = value.get_if<JsonValue::Array>();
  if (!result) expected(key, "an array", value);
  return *result;
}

std::vector<std::string> FieldReader::names(std::string_view key) {
  std::vector<std::string> names;
  for (const auto& item : array(key)) {
    const auto entry = fmt::format("{}[{}]", key, names.size());
    const auto* name = item.get_if<std::string>();
    if (!name || name->empty()) expected(entry, "a string that is not empty", item);
    if (std::find(names.begin(), names.end(), *name) != names.end())
      complain(path(entry), fmt::format("\"{}\" is there twice: keep one", printable(*name, 40)));
    names.push_back(*name);
  }
  return names;
}

JsonValue::Object FieldReader::rest() const {
  JsonValue::Object rest;
  for (const auto& member : *object_)
    if (std::find(asked_.begin(), asked_.end(), member.first) == asked_.end())
      rest.push_back(member);
  return rest;
}

void FieldReader::finish() const {
  const auto unknown = rest();
  if (!unknown.empty()) complain(path(unknown.front().first), "is not a field of this format");
}

}  // namespace fftune
