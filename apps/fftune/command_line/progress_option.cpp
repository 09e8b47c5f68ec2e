#include "apps/fftune/command_line/progress_option.hpp"

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/values.hpp"

namespace fftune::tool {

void add_progress_option(Command& command, std::string& value) {
  command.option("--progress WORD", value,
                 "auto, live, plain or none (default: auto, which is live on a terminal and plain "
                 "in a log)");
}

ProgressMode progress_mode(const std::string& value, const Output& output) {
  const std::string word = value.empty() ? "auto" : value;
  check_choice(word, "--progress", {"auto", "live", "plain", "none"});
  if (output.quiet() || word == "none") return ProgressMode::none;
  if (word == "live" || (word == "auto" && output.live())) return ProgressMode::live;
  return ProgressMode::plain;
}

}  // namespace fftune::tool
