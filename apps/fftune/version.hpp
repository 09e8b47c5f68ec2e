// Versions of fftune and of what it is built with.
#pragma once

#include <string>

namespace fftune::tool {

std::string version_text();

}  // namespace fftune::tool
