#include "apps/fftune/version.hpp"

#include <fmt/format.h>
#include <spdlog/version.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace fftune::tool {

std::string version_text() {
  return fmt::format(
      "fftune {}\ncompiler {}\nCLI11 {}\nfmt {}.{}.{}\nnlohmann-json {}.{}.{}\nspdlog {}.{}.{}\n",
      FFTUNE_VERSION, __VERSION__, CLI11_VERSION, FMT_VERSION / 10000, FMT_VERSION / 100 % 100,
      FMT_VERSION % 100, NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
      NLOHMANN_JSON_VERSION_PATCH, SPDLOG_VER_MAJOR, SPDLOG_VER_MINOR, SPDLOG_VER_PATCH);
}

}  // namespace fftune::tool
