// Versions of fftune and of its build dependencies.
#pragma once

#include <string>

namespace fftune::tool {

/// Lines of a name and a version, or one JSON object of them.
std::string version_text(bool as_json);

}  // namespace fftune::tool
