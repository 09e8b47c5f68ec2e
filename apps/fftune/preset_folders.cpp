#include "apps/fftune/preset_folders.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <CLI/CLI.hpp>

#include "core/error.hpp"

namespace fftune::tool {

void add_presets_option(CLI::App& command, std::string& value) {
  command
      .add_option("--presets", value,
                  "folder of presets (default: ./presets where it is there, else those the library "
                  "searches)")
      ->type_name("DIR");
}

std::vector<std::filesystem::path> preset_folders(const std::string& value,
                                                  const Environment& environment) {
  std::error_code error;
  if (!value.empty()) {
    if (!std::filesystem::is_directory(value, error))
      throw Error(
          ErrorKind::invalid_input,
          fmt::format("--presets {} is not a folder: give one that holds <device>/<op>.json",
                      value));
    return {value};
  }
  if (std::filesystem::is_directory("presets", error)) return {"presets"};
  return environment.preset_folders;
}

PresetLibrary load_presets(const std::string& value, const Session& session) {
  PresetLibrary library = PresetLibrary::load(preset_folders(value, session.environment));
  if (!value.empty() && library.files().empty())
    throw Error(ErrorKind::invalid_input,
                fmt::format("--presets {} holds no <device>/<op>.json: give the folder that the "
                            "devices' folders are in",
                            value));
  for (const std::string& complaint : library.complaints())
    spdlog::warn("{}; it is skipped", complaint);
  return library;
}

}  // namespace fftune::tool
