#include <fmt/format.h>

#include <filesystem>
#include <utility>

#include "apps/fftune/commands/presets.hpp"
#include "core/error.hpp"

namespace fftune::tool {

std::vector<PresetFile> preset_files(const std::vector<std::string>& paths) {
  std::vector<PresetFile> files;
  for (const std::string& path : paths) {
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    if (!std::filesystem::exists(status))
      throw Error(ErrorKind::invalid_input,
                  fmt::format("{} is not there: give a preset file, or a folder that holds "
                              "<device>/<op>.json",
                              path));
    if (!std::filesystem::is_directory(status)) {
      files.push_back(read_preset_file(path));
      continue;
    }
    std::vector<PresetFile> below = read_preset_folder(path);
    if (below.empty())
      throw Error(ErrorKind::invalid_input,
                  fmt::format("{} holds no <device>/<op>.json: give the folder that the devices' "
                              "folders are in",
                              path));
    for (PresetFile& file : below) files.push_back(std::move(file));
  }
  return files;
}

std::vector<PresetFile> whole_preset_files(const std::vector<std::string>& paths,
                                           const std::string& done) {
  std::vector<PresetFile> files = preset_files(paths);
  for (const PresetFile& file : files)
    if (!file.complaints.empty())
      throw Error(ErrorKind::invalid_input,
                  fmt::format("{}; nothing was {}: repair or leave out that file",
                              file.complaints.front(), done));
  return files;
}

std::vector<std::string> or_presets_folder(std::vector<std::string> paths) {
  if (paths.empty()) paths.emplace_back("presets");
  return paths;
}

std::string problem_without_op(const Problem& problem) {
  const std::string text = problem.text();
  return text.rfind(problem.op + "/", 0) == 0 ? text.substr(problem.op.size() + 1) : text;
}

}  // namespace fftune::tool
