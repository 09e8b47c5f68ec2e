#include "runtime/environment.hpp"

#include <dlfcn.h>
#include <link.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <string_view>
#include <system_error>

namespace fftune {
namespace {

namespace fs = std::filesystem;

/// Empty counts as not set.
std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (!value || !*value) return std::nullopt;
  return value;
}

/// A folder of this user's among the temporary ones, made if it is not there; "/nonexistent" if
/// something else has its name, or others may write to it.
fs::path own_temporary_folder() {
  std::error_code error;
  auto temporary = fs::temp_directory_path(error);
  if (error) temporary = "/tmp";
  auto folder = temporary / ("fftune-" + std::to_string(::geteuid()));
  struct stat status {};
  ::mkdir(folder.c_str(), 0700);
  const bool own = ::lstat(folder.c_str(), &status) == 0 && S_ISDIR(status.st_mode) &&
                   status.st_uid == ::geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
  return own ? folder : fs::path("/nonexistent");
}

/// The user's home, or where there is none its own_temporary_folder(). A relative HOME would be
/// another folder wherever fftune runs.
fs::path home_folder() {
  if (const auto home = variable("HOME"); home && fs::path(*home).is_absolute()) return *home;
  std::vector<char> text(1 << 14);
  passwd entry{};
  passwd* found = nullptr;
  if (::getpwuid_r(::getuid(), &entry, text.data(), text.size(), &found) == 0 && found &&
      found->pw_dir && *found->pw_dir)
    return found->pw_dir;
  return own_temporary_folder();
}

/// XDG Base Directory Specification: a path that is not absolute is to be ignored.
fs::path xdg_folder(const char* name, const char* below_home) {
  const auto value = variable(name);
  if (value && fs::path(*value).is_absolute()) return *value;
  return home_folder() / below_home;
}

/// The file that this code is in: the tool, the shared library, or a program linked statically.
fs::path own_file() {
  Dl_info info{};
  void* extra = nullptr;
  const auto* here = reinterpret_cast<const void*>(&read_environment);
  std::error_code error;
  if (::dladdr1(here, &info, &extra, RTLD_DL_LINKMAP) != 0 && extra) {
    // The main program has no name there, and its dli_fname is argv[0], which may be anything.
    const auto* name = static_cast<const link_map*>(extra)->l_name;
    if (name && *name) {
      auto path = fs::canonical(name, error);
      if (!error) return path;
    }
  }
  return fs::read_symlink("/proc/self/exe", error);
}

/// The folder of the presets that are installed with us. FFTUNE_PRESET_DIR is relative to the
/// prefix, which is one, two or three folders up (PREFIX/bin, PREFIX/lib, PREFIX/lib/<arch>), so
/// that an installed tree may be moved.
fs::path installed_presets() {
  const fs::path below_prefix = FFTUNE_PRESET_DIR;
  if (below_prefix.is_absolute()) return below_prefix;
  fs::path folder = own_file().parent_path();
  const auto usual = folder.parent_path() / below_prefix;
  for (int up = 0; up < 3; ++up) {
    folder = folder.parent_path();
    std::error_code error;
    if (fs::is_directory(folder / below_prefix, error)) return folder / below_prefix;
  }
  return usual;
}

fs::path user_presets() {
  return xdg_folder("XDG_DATA_HOME", ".local/share") / "fftune" / "presets";
}

void read_preset_folders(Environment& environment) {
  auto& folders = environment.preset_folders;
  const auto given = variable("FFTUNE_PRESETS").value_or("");
  for (std::string_view rest = given; !rest.empty();) {
    const auto part = rest.substr(0, rest.find(':'));
    rest.remove_prefix(part.size() < rest.size() ? part.size() + 1 : rest.size());
    if (part.empty()) continue;
    folders.emplace_back(part);
    // The user's and the installed folder need not be there; one that was named should.
    if (std::error_code error; !fs::exists(part, error))
      environment.preset_complaints.push_back("FFTUNE_PRESETS names '" + std::string(part) +
                                              "', which is not there: correct or unset it");
  }
  folders.push_back(environment.user_presets);
  folders.push_back(installed_presets());
}

void read_threads(Environment& environment) {
  const auto text = variable("FFTUNE_THREADS");
  if (!text) return;
  int threads = 0;
  const char* const end = text->data() + text->size();
  const auto [rest, error] = std::from_chars(text->data(), end, threads);
  if (error == std::errc() && rest == end && threads >= 1)
    environment.threads = threads;
  else
    environment.threads_complaint =
        "FFTUNE_THREADS is '" + *text + "': set it to a number of threads, 1 or more";
}

}  // namespace

const char* variable_of_launcher(const char* name) {
  return std::getenv(name);
}

std::size_t columns_asked_for() {
  const std::string text = variable("COLUMNS").value_or("");
  std::size_t columns = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), columns);
  return error == std::errc() && end == text.data() + text.size() ? columns : 0;
}

bool dumb_terminal() {
  const char* const name = std::getenv("TERM");
  return name && std::string_view(name) == "dumb";
}

Environment read_environment() {
  Environment environment;
  environment.user_presets = user_presets();
  read_preset_folders(environment);
  if (const auto cache = variable("FFTUNE_CACHE"))
    environment.cache_folder = *cache;
  else
    environment.cache_folder = xdg_folder("XDG_CACHE_HOME", ".cache") / "fftune";
  environment.state_folder = xdg_folder("XDG_STATE_HOME", ".local/state") / "fftune";
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"})
    if (const auto folder = variable(name))
      environment.toolkit_folders.push_back(fs::path(*folder) / "lib64");
  environment.toolkit_folders.emplace_back("/usr/local/cuda/lib64");
  if (const auto nccl = variable("FFTUNE_NCCL")) environment.nccl = *nccl;
  if (const auto bundle = variable("FFTUNE_BUNDLE")) environment.bundle = *bundle;
  if (const auto folder = variable("FFTUNE_DEVICE_SOURCES")) environment.device_sources = *folder;
  environment.no_jit = variable("FFTUNE_NO_JIT").value_or("0") != "0";
  read_threads(environment);
  environment.dumb_terminal = dumb_terminal();
  environment.no_color = variable("NO_COLOR").has_value() || environment.dumb_terminal;
  return environment;
}

}  // namespace fftune
