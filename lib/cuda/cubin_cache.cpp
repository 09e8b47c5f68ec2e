#include "cuda/cubin_cache.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <random>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "core/hash.hpp"
#include "cuda/cubin_file.hpp"

namespace fftune::cuda {
namespace {

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() { close(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int get() const { return descriptor_; }
  bool close() {
    const int descriptor = std::exchange(descriptor_, -1);
    return descriptor < 0 || ::close(descriptor) == 0;
  }

 private:
  int descriptor_;
};

bool ours_alone(const struct stat& status) {
  return status.st_uid == geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

/// No kernel comes near: what is larger is damaged.
constexpr off_t most_entry_bytes = off_t{256} << 20;

std::optional<std::string> read_file(int folder, const std::string& name) {
  const File file(openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat status {};
  if (file.get() < 0 || fstat(file.get(), &status) != 0) return {};
  if (!S_ISREG(status.st_mode) || !ours_alone(status)) return {};
  if (status.st_size > most_entry_bytes) return {};
  std::string content(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t done = 0;
  while (done < content.size()) {
    const auto count = ::read(file.get(), content.data() + done, content.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return {};
    done += static_cast<std::size_t>(count);
  }
  return content;
}

bool write_file(int folder, const std::string& name, std::string_view content) {
  File file(openat(folder, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (file.get() < 0) return false;
  while (!content.empty()) {
    const auto count = ::write(file.get(), content.data(), content.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    content.remove_prefix(static_cast<std::size_t>(count));
  }
  if (content.empty() && fsync(file.get()) == 0 && file.close()) return true;
  unlinkat(folder, name.c_str(), 0);
  return false;
}

/// A used entry gets a new access time, but at most this often.
constexpr std::time_t mark_again_seconds = 24 * 3600;
/// A temporary file this old has no owner any more.
constexpr std::time_t orphaned_seconds = 24 * 3600;
/// Eviction brings the folder down to this part of its bound, so that it is seldom needed.
constexpr double part_kept = 0.75;
/// The folder is checked after this many new entries, and after the first.
constexpr std::uint64_t look_through_interval = 256;

void mark_used(int folder, const std::string& name) {
  struct stat status {};
  if (fstatat(folder, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) return;
  if (std::time(nullptr) - status.st_mtime < mark_again_seconds) return;
  utimensat(folder, name.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
}

std::uint64_t random_number() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

}  // namespace

std::string CubinCache::file_name(std::string_view key) {
  return hex(fnv1a(key)) + ".cubin";
}

CubinCache::CubinCache(std::filesystem::path folder, std::uint64_t most_bytes)
    : folder_(std::move(folder)), most_bytes_(most_bytes), token_(random_number()) {
  if (folder_.empty()) return;
  std::error_code error;
  if (folder_.has_parent_path()) std::filesystem::create_directories(folder_.parent_path(), error);
  if (mkdir(folder_.c_str(), 0700) != 0 && errno != EEXIST) {
    refuse(fmt::format("cannot be made: {}", std::strerror(errno)));
    return;
  }
  descriptor_ = open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  struct stat status {};
  if (descriptor_ < 0 || fstat(descriptor_, &status) != 0)
    refuse(fmt::format("cannot be opened: {}", std::strerror(errno)));
  else if (status.st_uid != geteuid())
    refuse("belongs to another user");
  else if (!ours_alone(status))
    refuse("is writable by others: chmod 700 it");
  else if (faccessat(descriptor_, ".", W_OK | X_OK, AT_EACCESS) != 0)
    refuse(fmt::format("cannot be written: {}", std::strerror(errno)));
}

CubinCache::~CubinCache() {
  if (descriptor_ >= 0) close(descriptor_);
}

void CubinCache::refuse(const std::string& reason) {
  warning_ = fmt::format("kernels are not cached: {} {}", folder_.string(), reason);
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

std::optional<CompiledKernel> CubinCache::load(std::string_view key) const {
  if (descriptor_ < 0) return {};
  const auto name = file_name(key);
  const auto content = read_file(descriptor_, name);
  if (!content) return {};
  mark_used(descriptor_, name);
  return decode_cubin_file(key, *content);
}

void CubinCache::prune() const {
  struct Entry {
    std::time_t used;
    std::uint64_t bytes;
    std::string name;
  };
  std::vector<Entry> entries;
  std::uint64_t bytes = 0;
  const std::time_t now = std::time(nullptr);
  std::error_code error;  // what cannot be read now is read another time
  for (std::filesystem::directory_iterator it(folder_, error), end; !error && it != end;
       it.increment(error)) {
    const auto name = it->path().filename().string();
    struct stat status {};
    if (fstatat(descriptor_, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (!S_ISREG(status.st_mode) || it->path().extension() != ".cubin") {
      const bool temporary = name.starts_with('.') && name.find(".cubin.") != name.npos;
      if (temporary && now - status.st_mtime > orphaned_seconds)
        unlinkat(descriptor_, name.c_str(), 0);
      continue;
    }
    entries.push_back({status.st_mtime, static_cast<std::uint64_t>(status.st_size), name});
    bytes += entries.back().bytes;
  }
  if (bytes <= most_bytes_) return;
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.used, a.name) < std::tie(b.used, b.name);
  });
  const auto kept = static_cast<std::uint64_t>(part_kept * static_cast<double>(most_bytes_));
  for (const auto& entry : entries) {
    if (bytes <= kept) return;
    unlinkat(descriptor_, entry.name.c_str(), 0);
    bytes -= entry.bytes;
  }
}

CompiledKernel CubinCache::publish(std::string_view key, CompiledKernel kernel) const {
  if (descriptor_ < 0) return kernel;
  const std::string name = file_name(key);
  const std::string temporary = fmt::format(".{}.{}.{}", name, hex(token_), ++published_);
  if (published_ % look_through_interval == 1) prune();
  if (!write_file(descriptor_, temporary, encode_cubin_file(key, kernel))) return kernel;
  if (renameat2(descriptor_, temporary.c_str(), descriptor_, name.c_str(), RENAME_NOREPLACE) == 0)
    return kernel;
  auto winner = errno == EEXIST ? load(key) : std::nullopt;
  // A damaged entry is replaced; a file system without that flag knows the plain rename.
  if (winner || renameat(descriptor_, temporary.c_str(), descriptor_, name.c_str()) != 0)
    unlinkat(descriptor_, temporary.c_str(), 0);
  return winner ? std::move(*winner) : std::move(kernel);
}

}  // namespace fftune::cuda
