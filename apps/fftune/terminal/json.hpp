// Values of the library as JSON, for --json.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "device/facts.hpp"
#include "registry/op.hpp"
#include "registry/variant.hpp"
#include "store/json.hpp"
#include "store/record.hpp"

namespace fftune::tool {

using Json = JsonValue;

Json to_json(const Problem& problem);
Json to_json(const DeviceFacts& facts);
Json to_json(const ParameterValue& value);
Json to_json(const Recipe& recipe);
Json to_json(const TensorSpec& tensor);
/// As in a preset file.
Json to_json(const PresetRecord& record);

/// Members of a document that was read. They throw Error(invalid_input) for one of another type,
/// and for one that is not there unless there is another value for it.
std::string text_in(const Json& object, std::string_view name,
                    std::optional<std::string> otherwise = std::nullopt);
double number_in(const Json& object, std::string_view name,
                 std::optional<double> otherwise = std::nullopt);
const Json::Array& array_in(const Json& object, std::string_view name);

}  // namespace fftune::tool
