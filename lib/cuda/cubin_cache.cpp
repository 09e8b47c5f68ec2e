#include "cuda/cubin_cache.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <ctime>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/hash.hpp"
#include "cuda/bytes.hpp"

namespace fftune::cuda {
namespace {

// magic | checksum of all that follows | second hash of the key | its length | fields, each text
// with its length before it. Integers are 64 bits in the machine's byte order: a cache does not
// travel between machines.
constexpr std::string_view cache_magic = "fftunek1";
constexpr std::size_t checksum_end = 16;

/// Independent of the hash that names the file: another starting state.
std::uint64_t second_hash(std::string_view key) {
  return fnv1a(key, fnv1a("the second hash of a cubin's key"));
}

}  // namespace

std::string encode_cubin_file(std::string_view key, const CompiledKernel& kernel) {
  ByteWriter body;
  body.number(second_hash(key));
  body.number(key.size());
  body.text(kernel.lowered_name);
  body.text(kernel.report.name);
  body.number(static_cast<std::uint64_t>(kernel.report.registers));
  body.number(static_cast<std::uint64_t>(kernel.report.spill_bytes));
  body.number(static_cast<std::uint64_t>(kernel.report.static_shared_bytes));
  body.number(kernel.report.warnings.size());
  for (const auto& warning : kernel.report.warnings) body.text(warning);
  body.text(kernel.image);
  ByteWriter file;
  file.out = cache_magic;
  file.number(fnv1a(body.out));
  file.out += body.out;
  return std::move(file.out);
}

std::optional<CompiledKernel> decode_cubin_file(std::string_view key, std::string_view content) {
  if (content.size() < checksum_end || content.substr(0, cache_magic.size()) != cache_magic)
    return {};
  const auto checksum = ByteReader(content.substr(cache_magic.size())).number();
  const auto body = content.substr(checksum_end);
  if (checksum != fnv1a(body)) return {};
  ByteReader reader(body);
  if (reader.number() != second_hash(key) || reader.number() != key.size()) return {};
  CompiledKernel kernel;
  kernel.lowered_name = reader.text();
  kernel.report.name = reader.text();
  kernel.report.registers = reader.small_number();
  kernel.report.spill_bytes = reader.small_number();
  kernel.report.static_shared_bytes = reader.small_number();
  for (auto left = reader.number(); left > 0 && reader.good(); --left)
    kernel.report.warnings.push_back(reader.text());
  kernel.image = reader.text();
  if (!reader.at_end()) return {};
  return kernel;
}

namespace {

/// No kernel comes near: what is larger is damaged.
constexpr std::size_t most_entry_bytes = std::size_t{256} << 20;

/// A used entry gets a new access time, but at most this often.
constexpr std::time_t mark_again_seconds = 24 * 3600;
/// A temporary file this old has no owner any more.
constexpr std::time_t orphaned_seconds = 24 * 3600;
/// Eviction brings the folder down to this part of its bound, so that it is seldom needed.
constexpr double part_kept = 0.75;
/// The folder is checked after this many new entries, and after the first.
constexpr std::uint64_t look_through_interval = 256;

void mark_used(const OwnFolder& folder, const std::string& name) {
  const auto file = folder.find(name);
  if (file && std::time(nullptr) - file->changed.tv_sec >= mark_again_seconds) folder.touch(name);
}

bool write_file(const OwnFolder& folder, const std::string& name, std::string_view content) {
  auto file = folder.create(name);
  if (!file) return false;
  int code = write_all(file->value(), content);
  if (const int closing = file->close(); code == 0) code = closing;
  if (code != 0) folder.remove(name);
  return code == 0;
}

std::uint64_t random_number() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

}  // namespace

std::string CubinCache::file_name(std::string_view key) {
  return hex(fnv1a(key)) + ".cubin";
}

CubinCache::CubinCache(const std::filesystem::path& folder, std::uint64_t most_bytes)
    : most_bytes_(most_bytes), token_(random_number()) {
  if (folder.empty()) return;
  try {
    folder_.emplace(folder);
    if (folder_->is_writable()) return;
    refuse(folder, "cannot be written");
  } catch (const Error& error) {
    refuse(folder, error.what());
  }
}

void CubinCache::refuse(const std::filesystem::path& folder, const std::string& reason) {
  warning_ = fmt::format("kernels are not cached: {} {}", folder.string(), reason);
  folder_.reset();
}

std::optional<CompiledKernel> CubinCache::load(std::string_view key) const {
  if (!folder_) return {};
  const auto name = file_name(key);
  try {
    const auto content = InputFile(folder_->read(name)).read_whole(most_entry_bytes);
    mark_used(*folder_, name);
    return decode_cubin_file(key, content);
  } catch (const Error&) {
    return {};  // missing, or not to be trusted
  }
}

std::optional<FileLock> CubinCache::claim(std::string_view key) const {
  if (!folder_) return {};
  try {
    return std::optional<FileLock>(std::in_place,
                                   folder_->path() / ("." + file_name(key) + ".lock"),
                                   LockWait{.most_seconds = most_claimed_seconds});
  } catch (const Error&) {
    return {};
  }
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
  for (const std::string& name : folder_->names()) {
    const auto file = folder_->find(name);
    if (!file) continue;
    const std::time_t used = file->changed.tv_sec;
    if (name.ends_with(".cubin")) {
      entries.push_back({used, file->bytes, name});
      bytes += file->bytes;
    } else if (name.starts_with('.') && name.find(".cubin.") != name.npos &&
               now - used > orphaned_seconds) {
      folder_->remove(name);
    }
  }
  if (bytes <= most_bytes_) return;
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.used, a.name) < std::tie(b.used, b.name);
  });
  const auto kept = static_cast<std::uint64_t>(part_kept * static_cast<double>(most_bytes_));
  for (const auto& entry : entries) {
    if (bytes <= kept) return;
    folder_->remove(entry.name);
    bytes -= entry.bytes;
  }
}

CompiledKernel CubinCache::publish(std::string_view key, CompiledKernel kernel) const {
  if (!folder_) return kernel;
  const std::string name = file_name(key);
  const std::string temporary = fmt::format(".{}.{}.{}", name, hex(token_), ++published_);
  try {
    if (published_ % look_through_interval == 1) prune();
    if (!write_file(*folder_, temporary, encode_cubin_file(key, kernel))) return kernel;
  } catch (const Error&) {
    return kernel;
  }
  if (folder_->rename(temporary, name, false)) return kernel;
  auto winner = errno == EEXIST ? load(key) : std::nullopt;
  // A damaged entry is replaced; a file system without that flag knows the plain rename.
  if (winner || !folder_->rename(temporary, name, true)) folder_->remove(temporary);
  return winner ? std::move(*winner) : std::move(kernel);
}

}  // namespace fftune::cuda
