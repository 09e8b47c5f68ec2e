// The exit codes, and the footer of every --help that documents them.
#pragma once

#include "core/error.hpp"

namespace fftune::tool {

enum ExitCode : int {
  exit_good = 0,
  exit_check_failed = 1,
  exit_wrong_input = 2,
  exit_lacking = 3,
  exit_interrupted = 130,
};

constexpr const char* exit_code_footer =
    "Exit codes: 0 good; 1 a check failed; 2 the input was wrong, or a file cannot be read or "
    "written; 3 the machine lacks something, or a device or fftune itself failed; 130 "
    "interrupted, progress kept.";

constexpr ExitCode exit_code_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::invalid_input:
    case ErrorKind::io:
      return exit_wrong_input;
    case ErrorKind::unavailable:
    case ErrorKind::device_fault:
    case ErrorKind::internal:
      break;
  }
  return exit_lacking;
}

}  // namespace fftune::tool
