// The input of a command (the catalog, the environment, and its output) and its result.
#pragma once

#include <functional>

#include "apps/fftune/terminal/exit_code.hpp"
#include "apps/fftune/terminal/output.hpp"
#include "core/error.hpp"
#include "registry/catalog.hpp"
#include "runtime/environment.hpp"

namespace fftune::tool {

struct Session {
  const Catalog& catalog;
  const Environment& environment;
  const Output& output;
};

/// Documents the exit codes at the end of every --help.
inline constexpr const char* exit_code_footer =
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

/// Runs a command. Returns the exit code; throws Error.
using Run = std::function<int(const Session&)>;

}  // namespace fftune::tool
