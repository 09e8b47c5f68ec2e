// The report as one HTML file that needs nothing else: data, style, script and the chart library.
#pragma once

#include <string>

#include "apps/fftune/json.hpp"

namespace fftune::tool {

/// Throws Error(unavailable) if fftune was built without Chart.js.
std::string report_page(const Json& data);

}  // namespace fftune::tool
