// The process's environment, read here and nowhere else.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace fftune {

struct Environment {
  std::vector<std::filesystem::path> preset_folders;  // $FFTUNE_PRESETS, user's, installed
  std::filesystem::path cache_folder;                 // $FFTUNE_CACHE, or XDG cache/fftune
  std::filesystem::path state_folder;                 // XDG state/fftune: journals
  std::vector<std::filesystem::path> cuda_folders;    // $CUDA_HOME, $CUDA_PATH, where set
  bool no_color = false;                              // NO_COLOR
};

Environment read_environment();

}  // namespace fftune
