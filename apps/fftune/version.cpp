#include "apps/fftune/version.hpp"

#include <fmt/format.h>
#include <spdlog/version.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace fftune::tool {

std::string version_text(bool as_json) {
  const auto three = [](int major, int minor, int patch) {
    return fmt::format("{}.{}.{}", major, minor, patch);
  };
  const std::pair<const char*, std::string> versions[] = {
      {"fftune", FFTUNE_VERSION},
      {"compiler", __VERSION__},
      {"CLI11", CLI11_VERSION},
      {"fmt", three(FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100)},
      {"nlohmann-json", three(NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
                              NLOHMANN_JSON_VERSION_PATCH)},
      {"spdlog", three(SPDLOG_VER_MAJOR, SPDLOG_VER_MINOR, SPDLOG_VER_PATCH)}};
  nlohmann::ordered_json document;
  std::string lines;
  for (const auto& [name, version] : versions) {
    document[name] = version;
    lines += fmt::format("{} {}\n", name, version);
  }
  return as_json ? document.dump(2) + "\n" : lines;
}

}  // namespace fftune::tool
