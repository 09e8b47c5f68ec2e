// The embedded kernel sources, or those of a folder: file name -> text, with their includes
// followed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace fftune {

class SourceSet {
 public:
  /// Names are relative to the kernels folder: "gemm/groups.cuh".
  explicit SourceSet(std::map<std::string, std::string> files);

  bool has(std::string_view file) const { return files_.contains(std::string(file)); }
  /// All names, sorted.
  std::vector<std::string> names() const;
  /// These sources with the device sources (.cu and .cuh) of `folder`, a kernels folder, in place
  /// of their own. Host sources stay: they are what was compiled into this program. Throws
  /// Error(invalid_input) if the folder has none, or one cannot be read.
  SourceSet with_device_sources_of(const std::filesystem::path& folder) const;
  /// Throws Error(internal) if there is no such file.
  const std::string& text(std::string_view file) const;
  /// `file` and every embedded file it includes with quotes, directly or not, sorted; `file`
  /// first. A host source's includes are not embedded and are left out; a .cuh that is missing is
  /// an Error(internal).
  std::vector<std::string> closure(std::string_view file) const;
  /// One hash over the names and the code (code_of()) of the closures of `files`: sixteen hex
  /// digits. Neither a comment nor the format of a source changes it.
  std::string hash(const std::vector<std::string>& files) const;

 private:
  /// Read when it is first asked for, as most programs ask for few files.
  struct File {
    std::string text;
    mutable std::once_flag read;
    mutable std::uint64_t code_hash = 0;
    mutable std::vector<std::string> includes;  // those with quotes
  };

  const File& file_of(std::string_view name) const;
  const File& read(std::string_view name) const;

  std::map<std::string, File> files_;
};

}  // namespace fftune
