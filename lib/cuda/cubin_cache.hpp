// Compiled kernels on disk, shared by the processes of one user.
//
// An entry is a file named after the hash of its key. It is published whole (temporary file, fsync,
// atomic rename) and carries a second hash of the key and a checksum, so that a damaged entry or a
// collision is a miss and never a wrong kernel.
//
// Beyond its bound the least recently used entries are removed. Any process may remove any entry
// at any time: whoever misses it compiles it again.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "core/file_access.hpp"
#include "device/backend.hpp"

namespace fftune::cuda {

struct CompiledKernel {
  std::string lowered_name;  // the kernel's symbol in the image
  std::string image;         // the cubin
  KernelReport report;
};

class CubinCache {
 public:
  /// Some 20,000 kernels.
  static constexpr std::uint64_t default_most_bytes = std::uint64_t{4} << 30;

  /// Uses `folder`, making it (mode 0700) if need be. It must belong to this user and be writable
  /// by nobody else; if not, or if `folder` is empty, nothing is cached and warning() says why.
  explicit CubinCache(const std::filesystem::path& folder,
                      std::uint64_t most_bytes = default_most_bytes);
  CubinCache(const CubinCache&) = delete;
  CubinCache& operator=(const CubinCache&) = delete;

  /// Why nothing is cached, one line; empty if all is well or no cache was asked for.
  const std::string& warning() const { return warning_; }

  /// The kernel published under `key` (any text), unless it is missing or damaged.
  std::optional<CompiledKernel> load(std::string_view key) const;

  /// Publishes `kernel` and returns it, or what another process published first. A cache that
  /// cannot be written loses nothing but time.
  CompiledKernel publish(std::string_view key, CompiledKernel kernel) const;

  /// Until it is destroyed, whoever else claims `key` waits: one process compiles what several need
  /// at once, as the ranks of a group do. Nothing where there is no cache, or where another process
  /// has held it for `most_claimed_seconds`.
  std::optional<FileLock> claim(std::string_view key) const;
  static constexpr double most_claimed_seconds = 120;

  /// The file of `key`, in the folder.
  static std::string file_name(std::string_view key);

 private:
  void refuse(const std::filesystem::path& folder, const std::string& reason);
  /// Keeps the folder below its bound, and takes out temporary files that somebody left behind.
  void prune() const;

  std::uint64_t most_bytes_;
  std::optional<OwnFolder> folder_;  // checked once and used for every file since
  std::string warning_;
  std::uint64_t token_;  // with the count, a name for a temporary file that nobody else uses
  mutable std::atomic<std::uint64_t> published_{0};
};

// The bytes of a cached kernel.

/// The file's content for `kernel`, published under `key`.
std::string encode_cubin_file(std::string_view key, const CompiledKernel& kernel);

/// The inverse; nothing if the content is damaged or belongs to another key. Takes any bytes.
std::optional<CompiledKernel> decode_cubin_file(std::string_view key, std::string_view content);

}  // namespace fftune::cuda
