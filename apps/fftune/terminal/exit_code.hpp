// How a run of the tool ended, for scripts.
#pragma once

namespace fftune::tool {

enum ExitCode : int {
  exit_good = 0,
  exit_check_failed = 1,
  exit_wrong_input = 2,
  exit_lacking = 3,
  exit_interrupted = 130,
};

}  // namespace fftune::tool
