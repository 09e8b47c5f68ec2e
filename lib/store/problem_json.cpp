// The problem_json of the C API.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "store/json.hpp"
#include "store/preset_file.hpp"
#include "store/record_json.hpp"

namespace fftune {
namespace {

/// Empty if the value is no number.
std::string number_text(const JsonValue& value) {
  if (const auto* integer = value.get_if<std::int64_t>()) return fmt::format("{}", *integer);
  if (const auto* large = value.get_if<std::uint64_t>()) return fmt::format("{}", *large);
  if (const auto* real = value.get_if<double>()) return fmt::format("{}", *real);
  return "";
}

[[noreturn]] void wrong_type(const std::string& name, const std::string& expected,
                             const JsonValue& found, const std::string& advice) {
  throw Error(ErrorKind::invalid_input, fmt::format("{}: expected {}, found {}{}", name, expected,
                                                    json_brief(found), advice));
}

void check_size(const std::string& name, const JsonValue& value) {
  if (value.get_if<std::string>())
    wrong_type(name, "a size, which is an integer", value, ", a string: leave out the quotes");
  const auto* real = value.get_if<double>();
  // Beyond 64 bits an integer of JSON is read as a number with an exponent.
  if (value.get_if<std::uint64_t>() || (real && std::abs(*real) >= 0x1p63))
    wrong_type(name, "a size, which is an integer", value, ", which is more than any size");
  if (real)
    wrong_type(name, "a size, which is an integer", value,
               ": leave out the decimal point or the exponent");
}

/// Replaces {"max": N} of the size that counts tokens by N; whether it was there.
bool take_token_limit(const Op& op, JsonValue::Object& object) {
  bool taken = false;
  for (auto& [name, value] : object) {
    const auto* limit = value.get_if<JsonValue::Object>();
    if (!limit) continue;
    const auto sizes = op.sizes();
    const bool is_size = std::any_of(sizes.begin(), sizes.end(),
                                     [&, &name = name](const auto& f) { return f.name == name; });
    if (is_size && name != op.token_size())
      wrong_type(
          name, "an integer", value,
          fmt::format(": {{\"max\": N}} is for {} alone, which counts tokens", op.token_size()));
    if (name != op.token_size()) continue;
    if (limit->size() != 1 || limit->front().first != "max" ||
        !limit->front().second.get_if<std::int64_t>())
      wrong_type(name, "an integer, or {\"max\": N} with the largest", value, "");
    JsonValue most = limit->front().second;
    value = std::move(most);
    taken = true;
  }
  return taken;
}

void check_word(const std::string& name, const JsonValue& value) {
  if (!number_text(value).empty()) wrong_type(name, "a string", value, ": put it in quotes");
}

/// The options of the op that the object gives as JSON numbers, as text. In the object they become
/// strings, as options are. Throws for a size or an option that is of the wrong type.
std::map<std::string, std::string> take_numbers(const Op& op, JsonValue::Object& object) {
  const auto sizes = op.sizes();
  const auto options = op.options();
  const auto find = [](const auto& fields, const std::string& name) {
    return std::find_if(fields.begin(), fields.end(),
                        [&](const auto& field) { return field.name == name; });
  };
  std::map<std::string, std::string> numbers;
  for (auto& [name, value] : object) {
    if (find(sizes, name) != sizes.end()) check_size(name, value);
    const auto option = find(options, name);
    if (option == options.end()) continue;
    if (!option->number) check_word(name, value);
    if (auto text = number_text(value); !text.empty()) {
      numbers[name] = std::move(text);
      value = {std::string("0")};
    }
  }
  return numbers;
}

/// The op checks ranges (canonical): it knows them and names them in its errors.
ParsedProblem parsed(const JsonValue& value) {
  ParsedProblem parsed;
  parsed.problem = problem_from_json_value(value, "", std::numeric_limits<std::int64_t>::min(),
                                           &parsed.dtype_given);
  return parsed;
}

template <typename Read>
ParsedProblem naming_the_source(const Read& read) {
  try {
    return read();
  } catch (const Error& error) {
    throw Error(error.kind(), std::string("problem JSON: ") + error.what());
  }
}

}  // namespace

std::string record_json(const PresetRecord& record) {
  return json_line(to_json(record));
}

std::string problem_json(const Problem& problem) {
  return json_line(to_json(problem));
}

ParsedProblem problem_from_json(const std::string& text) {
  return naming_the_source([&] { return parsed(parse_json(text)); });
}

ParsedProblem problem_from_json(const std::string& text, const Catalog& catalog) {
  return naming_the_source([&] {
    auto value = parse_json(text);
    const auto* name = value.find("op");
    const auto* op = name ? name->get_if<std::string>() : nullptr;
    // Without an op, parsed() says what is wrong with it.
    if (!op || !is_name(*op)) return parsed(value);
    auto& fields = std::get<JsonValue::Object>(value.data);
    const Op& named = catalog.op(*op);
    const bool any_tokens = take_token_limit(named, fields);
    auto numbers = take_numbers(named, fields);
    auto result = parsed(value);
    result.any_tokens = any_tokens;
    for (auto& [option, number] : numbers) result.problem.options[option] = std::move(number);
    return result;
  });
}

}  // namespace fftune
