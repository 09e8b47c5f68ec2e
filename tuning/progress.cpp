#include "tuning/progress.hpp"

namespace fftune {

std::string_view phase_name(Phase phase) {
  switch (phase) {
    case Phase::setup:
      return "setup";
    case Phase::compile:
      return "compile";
    case Phase::screen:
      return "screen";
    case Phase::contend:
      return "contend";
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
