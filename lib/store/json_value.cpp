#include "store/json.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.hpp"

namespace fftune {
namespace {

using Json = nlohmann::json;

constexpr std::size_t deepest = 32;
constexpr std::size_t page_columns = 120;

/// Builds a JsonValue from the parser's events. Containers that are still open are known by
/// address: a parent's own container does not grow while its last child is open.
class Builder : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(std::string_view text) : text_(text) {}

  bool null() override { return add({nullptr}); }
  bool boolean(bool value) override { return add({value}); }
  bool number_integer(std::int64_t value) override { return add({value}); }
  bool number_unsigned(std::uint64_t value) override {
    const auto as_signed = static_cast<std::int64_t>(value);
    return as_signed >= 0 ? add({as_signed}) : add({value});
  }
  bool number_float(double value, const std::string&) override { return add({value}); }
  bool string(std::string& value) override { return add({std::move(value)}); }
  bool binary(Json::binary_t&) override { return false; }  // no text holds one

  bool start_object(std::size_t) override { return open({JsonValue::Object{}}); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open({JsonValue::Array{}}); }
  bool end_array() override { return close(); }
  bool key(std::string& name) override {
    key_ = std::move(name);
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const Json::exception& error) override {
    // The reason is the last part of "[json.exception…] parse error at …: syntax error … - reason".
    std::string reason = error.what();
    if (const auto dash = reason.rfind(" - "); dash != reason.npos) reason.erase(0, dash + 3);
    if (const auto bracket = reason.rfind("] "); bracket != reason.npos)
      reason.erase(0, bracket + 2);
    const auto before = text_.substr(0, std::min(text_.size(), position ? position - 1 : 0));
    const auto line_start = before.rfind('\n');
    const auto column = before.size() - (line_start == before.npos ? 0 : line_start + 1) + 1;
    failure = position > text_.size()
                  ? "not JSON: the text ends too early, it is cut short"
                  : fmt::format("not JSON at line {}, column {}: {}",
                                std::count(before.begin(), before.end(), '\n') + 1, column,
                                printable(reason, 160));
    return false;
  }

  JsonValue root;
  std::string failure;

 private:
  JsonValue* add(JsonValue value, int) {
    if (open_.empty()) {
      root = std::move(value);
      return &root;
    }
    if (auto* array = std::get_if<JsonValue::Array>(&open_.back()->data))
      return &array->emplace_back(std::move(value));
    auto& object = std::get<JsonValue::Object>(open_.back()->data);
    return &object.emplace_back(std::move(key_), std::move(value)).second;
  }
  bool add(JsonValue value) { return add(std::move(value), 0) != nullptr; }
  bool open(JsonValue value) {
    if (open_.size() == deepest) {
      failure = fmt::format("values are nested deeper than {}", deepest);
      return false;
    }
    open_.push_back(add(std::move(value), 0));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view text_;
  std::vector<JsonValue*> open_;
  std::string key_;
};

std::string quoted(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

struct ScalarText {
  std::string operator()(std::nullptr_t) const { return "null"; }
  std::string operator()(const std::string& text) const { return quoted(text); }
  std::string operator()(const JsonValue::Array&) const { return ""; }
  std::string operator()(const JsonValue::Object&) const { return ""; }
  template <typename Number>
  std::string operator()(Number number) const {
    return Json(number).dump();
  }
};

/// One line; `space` follows each comma and colon.
std::string line(const JsonValue& value, const char* space) {
  std::string text;
  if (const auto* array = value.get_if<JsonValue::Array>()) {
    for (const auto& item : *array)
      text += fmt::format("{}{}", text.empty() ? "" : fmt::format(",{}", space), line(item, space));
    return "[" + text + "]";
  }
  if (const auto* object = value.get_if<JsonValue::Object>()) {
    for (const auto& [key, item] : *object)
      text += fmt::format("{}{}:{}{}", text.empty() ? "" : fmt::format(",{}", space), quoted(key),
                          space, line(item, space));
    return "{" + text + "}";
  }
  return std::visit(ScalarText(), value.data);
}

bool is_container(const JsonValue& value) {
  return value.get_if<JsonValue::Array>() || value.get_if<JsonValue::Object>();
}

bool has_containers(const JsonValue& value) {
  if (const auto* array = value.get_if<JsonValue::Array>())
    return std::any_of(array->begin(), array->end(), is_container);
  const auto* object = value.get_if<JsonValue::Object>();
  return object && std::any_of(object->begin(), object->end(),
                               [](const auto& member) { return is_container(member.second); });
}

/// `column` is where the value starts on its line.
std::string page(const JsonValue& value, std::size_t indent, std::size_t column) {
  if (!has_containers(value)) {
    auto text = line(value, " ");
    if (!is_container(value) || column + text.size() <= page_columns) return text;
  }
  const std::string inner(indent + 2, ' ');
  std::string text;
  const auto member = [&](const std::string& prefix, const JsonValue& item) {
    text += fmt::format("{}{}{}{}", text.empty() ? "\n" : ",\n", inner, prefix,
                        page(item, indent + 2, indent + 2 + prefix.size()));
  };
  const auto* array = value.get_if<JsonValue::Array>();
  if (array) {
    for (const auto& item : *array) member("", item);
  } else {
    for (const auto& [key, item] : std::get<JsonValue::Object>(value.data))
      member(quoted(key) + ": ", item);
  }
  return fmt::format("{}{}\n{}{}", array ? '[' : '{', text, std::string(indent, ' '),
                     array ? ']' : '}');
}

}  // namespace

const JsonValue* JsonValue::find(std::string_view key) const {
  const auto* object = get_if<Object>();
  if (!object) return nullptr;
  const auto member = std::find_if(object->begin(), object->end(),
                                   [&](const auto& entry) { return entry.first == key; });
  return member == object->end() ? nullptr : &member->second;
}

JsonValue::JsonValue(std::initializer_list<Member> members) {
  auto& object = data.emplace<Object>();
  object.reserve(members.size());
  for (const Member& member : members) object.emplace_back(member.name, member.value);
}

JsonValue& JsonValue::operator[](std::string_view key) {
  if (get_if<std::nullptr_t>()) data.emplace<Object>();
  auto& members = std::get<Object>(data);
  for (auto& [name, value] : members)
    if (name == key) return value;
  return members.emplace_back(key, nullptr).second;
}

void JsonValue::push_back(JsonValue item) {
  if (get_if<std::nullptr_t>()) data.emplace<Array>();
  std::get<Array>(data).push_back(std::move(item));
}

std::size_t JsonValue::size() const {
  if (const auto* array = get_if<Array>()) return array->size();
  const auto* object = get_if<Object>();
  return object ? object->size() : 0;
}

JsonValue parse_json(std::string_view text) {
  if (text.find_first_not_of(" \t\r\n") == text.npos)
    throw Error(ErrorKind::invalid_input, "not JSON: there is no text at all");
  Builder builder(text);
  if (!Json::sax_parse(text.begin(), text.end(), &builder))
    throw Error(ErrorKind::invalid_input,
                builder.failure.empty() ? "not JSON" : std::move(builder.failure));
  return std::move(builder.root);
}

const JsonValue& member(const JsonValue& object, std::string_view key) {
  if (const JsonValue* const found = object.find(key)) return *found;
  throw Error(ErrorKind::invalid_input, fmt::format("'{}' is missing", key));
}

const JsonValue::Array& items_of(const JsonValue& array) {
  if (const auto* items = array.get_if<JsonValue::Array>()) return *items;
  not_as_expected(array, "an array");
}

void not_as_expected(const JsonValue& value, std::string_view what) {
  throw Error(ErrorKind::invalid_input,
              fmt::format("expected {}, found {}", what, json_brief(value)));
}

std::string json_line(const JsonValue& value) {
  return line(value, "");
}

std::string json_page(const JsonValue& value) {
  return page(value, 0, 0) + "\n";
}

std::string json_library_version() {
  return fmt::format("{}.{}.{}", NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
                     NLOHMANN_JSON_VERSION_PATCH);
}

std::string json_brief(const JsonValue& value) {
  if (value.get_if<JsonValue::Array>()) return "an array";
  if (value.get_if<JsonValue::Object>()) return "an object";
  if (const auto* text = value.get_if<std::string>()) return '"' + printable(*text, 40) + '"';
  return line(value, "");
}

std::string printable(std::string_view text, std::size_t limit) {
  std::string result;
  for (const char c : text) {
    if (result.size() >= limit) return result + "...";
    if (c >= ' ' && c <= '~')
      result += c;
    else
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  }
  return result;
}

}  // namespace fftune
