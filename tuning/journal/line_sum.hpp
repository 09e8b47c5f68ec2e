// The sum at the end of a line of JSON: it tells a line that a disk or an editor changed from one
// that was written.
#pragma once

#include <string>
#include <string_view>

#include "store/json.hpp"

namespace fftune {

/// The object as one line, with a last member `sum`: the hash of what stands before it.
std::string summed_line(const JsonValue& object);

enum class LineSum { none, right, wrong };

/// Lines of older versions have none.
LineSum sum_of_line(std::string_view line);

}  // namespace fftune
