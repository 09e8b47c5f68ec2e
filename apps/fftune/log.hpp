// The log: spdlog's default logger, one plain line a message on stderr.
#pragma once

namespace fftune::tool {

/// -q: errors alone; -v: everything; else notes and warnings.
void start_log(bool verbose, bool quiet, bool no_color);

}  // namespace fftune::tool
