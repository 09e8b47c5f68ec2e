// As much of JSON Schema (draft 2020-12) as presets/schema.json uses. A keyword that is not known
// here fails the test, so that the schema cannot say what nobody checks.
#pragma once

#include <string>

#include "store/json.hpp"

namespace fftune::example {

/// Why `value` does not fit `schema`, the first reason; empty if it fits. `root` holds the $defs.
/// Throws std::runtime_error for a schema that goes beyond what is supported here.
std::string misfit(const JsonValue& root, const JsonValue& schema, const JsonValue& value);

}  // namespace fftune::example
