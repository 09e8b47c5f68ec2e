// The problem_json of the C API.
#include <cstdint>
#include <limits>
#include <string>

#include "core/error.hpp"
#include "store/preset_file.hpp"
#include "store/record_json.hpp"

namespace fftune {

std::string record_json(const PresetRecord& record) {
  return json_line(to_json(record));
}

std::string problem_json(const Problem& problem) {
  return json_line(to_json(problem));
}

ParsedProblem problem_from_json(const std::string& text) {
  try {
    ParsedProblem parsed;
    // The op checks ranges (canonical): it knows them and names them in its errors.
    parsed.problem = problem_from_json_value(
        parse_json(text), "", std::numeric_limits<std::int64_t>::min(), &parsed.dtype_given);
    return parsed;
  } catch (const Error& error) {
    throw Error(error.kind(), std::string("problem JSON: ") + error.what());
  }
}

}  // namespace fftune
