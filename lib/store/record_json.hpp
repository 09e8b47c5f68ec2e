// Records, problems and devices as JSON values, both ways; docs/presets.md has every field.
#pragma once

#include <string>

#include "store/json.hpp"
#include "store/record.hpp"

namespace fftune {

/// Numbers are rounded to the resolution of a measurement: times to 0.01 us.
JsonValue to_json(const PresetRecord& record);
JsonValue to_json(const Problem& problem);
JsonValue to_json(const PresetDevice& device);

/// The inverses. Each throws Error(invalid_input) with one line that names the field. `where` is
/// the path that the complaint starts from.
PresetRecord record_from_json(const JsonValue& value);
/// Sizes are integers of at least `least_size`, options strings; "dtype" may be left out if
/// `dtype_given` is there to be told.
Problem problem_from_json_value(const JsonValue& value, const std::string& where,
                                std::int64_t least_size, bool* dtype_given);
PresetDevice device_from_json(const JsonValue& value, const std::string& where);

}  // namespace fftune
