// The process's environment, read here and nowhere else.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace fftune {

struct Environment {
  std::vector<std::filesystem::path> preset_folders;  // $FFTUNE_PRESETS, user's, installed
  std::vector<std::string> preset_complaints;         // Entries of $FFTUNE_PRESETS that do not
                                                      // exist.
  std::filesystem::path user_presets;                 // the user's: XDG data/fftune/presets
  std::filesystem::path cache_folder;                 // $FFTUNE_CACHE, or XDG cache/fftune
  std::filesystem::path state_folder;                 // XDG state/fftune: journals
  /// Where a CUDA toolkit's libraries may be, after the loader's own folders: lib64 of $CUDA_HOME
  /// and $CUDA_PATH, then of /usr/local/cuda.
  std::vector<std::filesystem::path> toolkit_folders;
  std::filesystem::path nccl;    // $FFTUNE_NCCL: libnccl.so.2; empty: the loader's
  std::filesystem::path bundle;  // $FFTUNE_BUNDLE: compiled kernels; empty: none
  /// $FFTUNE_DEVICE_SOURCES: the folder of the .cu and .cuh to compile; empty: those built in.
  std::filesystem::path device_sources;
  bool no_jit = false;            // $FFTUNE_NO_JIT: anything but 0
  std::optional<int> threads;     // $FFTUNE_THREADS: of the CPU backend, at most
  std::string threads_complaint;  // why FFTUNE_THREADS is not a number; empty: it is, or not set
  bool no_color = false;          // NO_COLOR, or a terminal without escapes
  bool dumb_terminal = false;     // TERM=dumb: no escapes at all
};

Environment read_environment();

/// $COLUMNS, how wide a page may be; 0 where it is not set or is not a number.
std::size_t columns_asked_for();

/// A variable that a launcher of processes sets; null where it does not.
const char* variable_of_launcher(const char* name);

/// Environment::dumb_terminal alone, for a fault's last words: it needs no memory.
bool dumb_terminal();

}  // namespace fftune
