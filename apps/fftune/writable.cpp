#include "apps/fftune/writable.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>

#include "core/error.hpp"

namespace fftune::tool {

namespace {

// Permission bits alone do not tell (root, read-only mounts, quotas): only writing does.
std::string unwritable(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return error.message();
  const auto probe = folder / fmt::format(".writable-{}", getpid());
  errno = 0;
  const bool written = static_cast<bool>(std::ofstream(probe) << "probe" << std::flush);
  const int reason = errno;
  std::filesystem::remove(probe, error);
  return written ? "" : std::strerror(reason);
}

}  // namespace

void require_mergeable(const std::filesystem::path& folder, const PresetDevice& device,
                       const std::string& op) {
  if (const std::string reason = unwritable(folder / device.slug); !reason.empty())
    throw Error(ErrorKind::io,
                fmt::format("--out {} cannot be written ({}): give a folder that can",
                            folder.string(), reason));
  const auto path = folder / device.slug / (op + ".json");
  if (!std::filesystem::exists(path)) return;
  const PresetFile file = read_preset_file(path);
  if (!file.complaints.empty())
    throw Error(ErrorKind::invalid_input,
                fmt::format("{}: records cannot be added to a damaged file: repair or move it away",
                            file.complaints.front()));
}

void require_writable_file(const std::filesystem::path& file, const std::string& where) {
  errno = 0;
  if (std::ofstream(file, std::ios::app)) return;
  throw Error(ErrorKind::io, fmt::format("{} {} cannot be written ({}): give a file that can",
                                         where, file.string(), std::strerror(errno)));
}

}  // namespace fftune::tool
