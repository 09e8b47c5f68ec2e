#include "tuning/journal/progress.hpp"

namespace fftune {

std::string_view phase_name(Phase phase) {
  switch (phase) {
    case Phase::setup:
      return "setup";
    case Phase::compile:
      return "compile";
    case Phase::screen:
      return "screen";
    case Phase::semifinals:
      return "semifinals";
    case Phase::finals:
      return "finals";
    case Phase::combine:
      return "combine";
    case Phase::done:
      return "done";
  }
  return "";
}

}  // namespace fftune
