// The option --progress of commands that take a while.
#pragma once

#include <string>

#include "apps/fftune/terminal/progress.hpp"

namespace fftune::tool {

struct Command;

void add_progress_option(Command& command, std::string& value);

/// "auto" (or empty) is live on a terminal, else plain; quiet is none.
ProgressMode progress_mode(const std::string& value, const Output& output);

}  // namespace fftune::tool
