// A bundle: compiled kernels in one file, for machines that have no run-time compiler.
//
// Unlike the cache, which any process fills, a bundle is made once (fftune bundle), travels between
// machines, and is only read. Its index names each kernel by architecture, source file and name
// expression, with the hash of the source's code: a kernel whose source has changed is not used.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/file_access.hpp"
#include "cuda/cubin_cache.hpp"
#include "device/program.hpp"
#include "device/sources.hpp"

namespace fftune::cuda {

/// Identifies a kernel in a bundle.
struct BundleKey {
  std::string arch;  // "sm_90a"
  std::string file;
  std::string expression;

  auto operator<=>(const BundleKey&) const = default;
};

struct BundledKernel {
  std::string code_hash;  // SourceSet::hash({file})
  CompiledKernel kernel;
};

/// The bytes of a file with these kernels; the same for the same kernels.
std::string encode_bundle(const std::map<BundleKey, BundledKernel>& kernels,
                          std::string_view fftune_version, std::string_view nvrtc_version);

class Bundle {
 public:
  /// Reads the index; kernels are read when they are asked for. Throws Error(io) if there is no
  /// such regular file, Error(invalid_input) if it is cut short, damaged or no bundle.
  explicit Bundle(const std::filesystem::path& path);
  Bundle(const Bundle&) = delete;
  Bundle& operator=(const Bundle&) = delete;

  struct Found {
    std::optional<CompiledKernel> kernel;
    std::string reason;  // why there is none, one line
  };
  /// Any thread may call it.
  Found find(const BundleKey& key, std::string_view code_hash) const;

  const std::filesystem::path& path() const { return path_; }
  std::size_t size() const { return entries_.size(); }
  std::set<std::string> archs() const;
  /// Why it serves `arch` only in part or not at all, one line; empty if nothing is wrong.
  std::string complaint(const std::string& arch, const SourceSet& sources) const;

 private:
  struct Entry {
    std::string code_hash;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  void read_index(std::uint64_t file_bytes);
  std::string read(std::uint64_t offset, std::uint64_t bytes) const;
  [[noreturn]] void refuse(const std::string& why) const;

  std::filesystem::path path_;
  std::optional<InputFile> file_;
  std::string version_;  // of the fftune that made it
  std::map<BundleKey, Entry> entries_;
};

}  // namespace fftune::cuda
