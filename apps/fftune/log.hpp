// The log: spdlog's default logger, one plain line a message on stderr.
#pragma once

#include "apps/fftune/output.hpp"

namespace fftune::tool {

/// -q: errors alone; -v: everything; else notes and warnings.
void start_log(const Output& output, bool no_color);

}  // namespace fftune::tool
