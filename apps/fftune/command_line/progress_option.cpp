#include "apps/fftune/command_line/progress_option.hpp"

#include "apps/fftune/command_line/command.hpp"

namespace fftune::tool {

void add_progress_option(Command& command, std::string& value) {
  command.option("--progress WORD", choice(value, {"auto", "live", "plain", "none"}),
                 "auto, live, plain or none (default: auto, which is live on a terminal and plain "
                 "in a log)");
}

ProgressMode progress_mode(const std::string& value, const Output& output) {
  if (output.quiet() || value == "none") return ProgressMode::none;
  if (value == "live" || (value != "plain" && output.live())) return ProgressMode::live;
  return ProgressMode::plain;
}

}  // namespace fftune::tool
