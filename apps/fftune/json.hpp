// Values of the library as JSON, for --json.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "device/facts.hpp"
#include "registry/op.hpp"
#include "registry/variant.hpp"

namespace fftune::tool {

using Json = nlohmann::ordered_json;

Json to_json(const Problem& problem);
Json to_json(const DeviceFacts& facts);
Json to_json(const ParameterValue& value);
Json to_json(const Recipe& recipe);
Json to_json(const TensorSpec& tensor);

}  // namespace fftune::tool
