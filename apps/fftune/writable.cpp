#include "apps/fftune/writable.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "core/error.hpp"

namespace fftune::tool {

LockWait lock_wait(const std::atomic<bool>* cancelled) {
  LockWait wait;
  wait.tell = [](const std::string& line) { spdlog::warn("{}", line); };
  if (cancelled) wait.cancelled = [cancelled] { return cancelled->load(); };
  return wait;
}

void require_out(const std::filesystem::path& folder, const PresetDevice& device,
                 const std::string& op, const LockWait& wait, const std::string& where) {
  try {
    require_mergeable(folder, device, op, wait);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::io) throw;
    throw Error(ErrorKind::io,
                fmt::format("{} {} cannot be written: {}", where, folder.string(), error.what()));
  }
}

void require_writable_file(const std::filesystem::path& file, const std::string& where) {
  try {
    require_replaceable(file);
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("{} {}: {}", where, file.string(), error.what()));
  }
}

}  // namespace fftune::tool
