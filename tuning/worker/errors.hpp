// Kinds of errors by name, so that an Error thrown in a worker is thrown again by its supervisor.
#pragma once

#include <string>
#include <string_view>

#include "core/error.hpp"

namespace fftune {

std::string_view error_kind_name(ErrorKind kind);
/// Throws Error(invalid_input).
ErrorKind parse_error_kind(std::string_view name);

}  // namespace fftune
