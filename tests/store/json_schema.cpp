#include "store/json_schema.hpp"

#include <regex>
#include <set>
#include <stdexcept>

namespace fftune::example {
namespace {

const std::string& text_of(const JsonValue& value) {
  return std::get<std::string>(value.data);
}

bool is_number(const JsonValue& value) {
  return value.get_if<std::int64_t>() || value.get_if<std::uint64_t>() || value.get_if<double>();
}

long double number_of(const JsonValue& value) {
  if (const auto* integer = value.get_if<std::int64_t>()) return *integer;
  if (const auto* large = value.get_if<std::uint64_t>()) return *large;
  return std::get<double>(value.data);
}

bool has_type(const JsonValue& value, const std::string& type) {
  if (type == "object") return value.get_if<JsonValue::Object>();
  if (type == "array") return value.get_if<JsonValue::Array>();
  if (type == "string") return value.get_if<std::string>();
  if (type == "boolean") return value.get_if<bool>();
  if (type == "number") return is_number(value);
  if (type == "integer") return is_number(value) && !value.get_if<double>();
  throw std::runtime_error("the schema has a type '" + type + "'");
}

/// The value against one keyword.
class Keyword {
 public:
  Keyword(const JsonValue& root, const JsonValue& schema, const JsonValue& value)
      : root_(root), schema_(schema), value_(value) {}

  std::string misfit_of(const std::string& keyword, const JsonValue& rule) const {
    if (keyword == "$ref") return misfit(root_, definition(text_of(rule)), value_);
    if (keyword == "type") return has_type(value_, text_of(rule)) ? "" : "no " + text_of(rule);
    if (keyword == "const") return json_line(value_) == json_line(rule) ? "" : "not the constant";
    if (keyword == "enum") return among(std::get<JsonValue::Array>(rule.data));
    if (keyword == "anyOf") return any_of(std::get<JsonValue::Array>(rule.data));
    if (is_number(value_)) {
      if (keyword == "minimum") return number_of(value_) >= number_of(rule) ? "" : "too small";
      if (keyword == "maximum") return number_of(value_) <= number_of(rule) ? "" : "too large";
      if (keyword == "exclusiveMinimum")
        return number_of(value_) > number_of(rule) ? "" : "too small";
    }
    if (const auto* text = value_.get_if<std::string>()) {
      if (keyword == "minLength") return text->size() >= number_of(rule) ? "" : "too short";
      if (keyword == "pattern")
        return std::regex_search(*text, std::regex(text_of(rule))) ? "" : "no match";
    }
    if (const auto* array = value_.get_if<JsonValue::Array>()) {
      if (keyword == "minItems") return array->size() >= number_of(rule) ? "" : "too few";
      if (keyword == "uniqueItems") return unique(*array);
      if (keyword == "items")
        for (const auto& item : *array)
          if (auto reason = misfit(root_, rule, item); !reason.empty()) return reason;
    }
    if (const auto* object = value_.get_if<JsonValue::Object>())
      return member(keyword, rule, *object);
    return "";
  }

 private:
  const JsonValue& definition(const std::string& reference) const {
    const std::string prefix = "#/$defs/";
    const auto* found = root_.find("$defs")->find(reference.substr(prefix.size()));
    if (reference.rfind(prefix, 0) != 0 || !found)
      throw std::runtime_error("the schema refers to '" + reference + "'");
    return *found;
  }
  std::string among(const JsonValue::Array& choices) const {
    for (const auto& choice : choices)
      if (json_line(choice) == json_line(value_)) return "";
    return "not one of the choices";
  }
  std::string any_of(const JsonValue::Array& schemas) const {
    for (const auto& schema : schemas)
      if (misfit(root_, schema, value_).empty()) return "";
    return "none of the alternatives";
  }
  static std::string unique(const JsonValue::Array& array) {
    std::set<std::string> lines;
    for (const auto& item : array)
      if (!lines.insert(json_line(item)).second) return "twice: " + json_line(item);
    return "";
  }
  std::string member(const std::string& keyword, const JsonValue& rule,
                     const JsonValue::Object& object) const {
    if (keyword == "required")
      for (const auto& name : std::get<JsonValue::Array>(rule.data))
        if (!value_.find(text_of(name))) return text_of(name) + " is missing";
    const auto* properties = schema_.find("properties");
    for (const auto& [key, item] : object) {
      const auto* property = properties ? properties->find(key) : nullptr;
      const JsonValue* against = nullptr;
      if (keyword == "properties") against = property;
      if (keyword == "propertyNames")
        if (auto reason = misfit(root_, rule, {key}); !reason.empty()) return key + ": " + reason;
      if (keyword == "additionalProperties" && !property) {
        if (rule.get_if<bool>()) return key + " is no property";
        against = &rule;
      }
      if (!against) continue;
      if (auto reason = misfit(root_, *against, item); !reason.empty()) return key + ": " + reason;
    }
    return "";
  }

  const JsonValue& root_;
  const JsonValue& schema_;
  const JsonValue& value_;
};

}  // namespace

std::string misfit(const JsonValue& root, const JsonValue& schema, const JsonValue& value) {
  static const std::set<std::string> known{"$ref",       "additionalProperties",
                                           "anyOf",      "const",
                                           "enum",       "exclusiveMinimum",
                                           "items",      "maximum",
                                           "minimum",    "minItems",
                                           "minLength",  "pattern",
                                           "required",   "properties",
                                           "type",       "propertyNames",
                                           "uniqueItems"};
  static const std::set<std::string> silent{"$schema", "$id", "$defs", "title", "description"};
  for (const auto& [keyword, rule] : std::get<JsonValue::Object>(schema.data)) {
    if (silent.contains(keyword)) continue;
    if (!known.contains(keyword))
      throw std::runtime_error("the schema has a keyword '" + keyword + "'");
    if (auto reason = Keyword(root, schema, value).misfit_of(keyword, rule); !reason.empty())
      return reason;
  }
  return "";
}

}  // namespace fftune::example
