#include "apps/fftune/terminal/json.hpp"

#include <fmt/format.h>

#include <utility>

#include "core/error.hpp"
#include "store/preset_file.hpp"
#include "tuning/protocol/messages.hpp"

namespace fftune::tool {

Json to_json(const Problem& problem) {
  Json json = {{"op", problem.op}, {"pass", problem.pass}, {"dtype", dtype_name(problem.dtype)}};
  for (const auto& [name, value] : problem.sizes) json[name] = value;
  for (const auto& [name, value] : problem.options) json[name] = value;
  return json;
}

Json to_json(const DeviceFacts& facts) {
  Json json = message_of(facts);
  json["slug"] = facts.slug();
  return json;
}

Json to_json(const ParameterValue& value) {
  return value.is_word() ? Json(value.word()) : Json(value.number());
}

Json to_json(const Recipe& recipe) {
  Json ids = Json::Array();
  for (const Variant& variant : recipe) ids.push_back(variant.id());
  return ids;
}

Json to_json(const TensorSpec& tensor) {
  return {{"name", tensor.name},
          {"role", role_name(tensor.role)},
          {"dtype", dtype_name(tensor.dtype)},
          {"shape", tensor.shape}};
}

Json to_json(const PresetRecord& record) {
  return parse_json(record_json(record));
}

namespace {

[[noreturn]] void fail(std::string_view name, const char* expected, const Json* found) {
  throw Error(ErrorKind::invalid_input, fmt::format("{}: expected {}, found {}", name, expected,
                                                    found ? json_brief(*found) : "nothing"));
}

}  // namespace

std::string text_in(const Json& object, std::string_view name,
                    std::optional<std::string> otherwise) {
  const Json* const member = object.find(name);
  if (member == nullptr && otherwise) return *otherwise;
  if (const auto* text = member ? member->get_if<std::string>() : nullptr) return *text;
  fail(name, "a text", member);
}

double number_in(const Json& object, std::string_view name, std::optional<double> otherwise) {
  const Json* const member = object.find(name);
  if (member == nullptr && otherwise) return *otherwise;
  if (member) {
    if (const auto* real = member->get_if<double>()) return *real;
    if (const auto* whole = member->get_if<std::int64_t>()) return static_cast<double>(*whole);
    if (const auto* large = member->get_if<std::uint64_t>()) return static_cast<double>(*large);
  }
  fail(name, "a number", member);
}

const Json::Array& array_in(const Json& object, std::string_view name) {
  const Json* const member = object.find(name);
  if (const auto* array = member ? member->get_if<Json::Array>() : nullptr) return *array;
  fail(name, "an array", member);
}

}  // namespace fftune::tool
