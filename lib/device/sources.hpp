// The embedded kernel sources: file name -> text, with their includes followed.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace fftune {

class SourceSet {
 public:
  /// Names are relative to the kernels folder: "gemm/mma_sync.cuh".
  explicit SourceSet(std::map<std::string, std::string> files) : files_(std::move(files)) {}

  /// Throws Error(internal) if there is no such file.
  const std::string& text(std::string_view file) const;
  /// `file` and every embedded file it includes with quotes, directly or not, sorted; `file`
  /// first. A host source's includes are not embedded and are left out; a .cuh that is missing is
  /// an Error(internal).
  std::vector<std::string> closure(std::string_view file) const;
  /// One hash over the names and texts of the closures of `files`: sixteen hex digits.
  std::string hash(const std::vector<std::string>& files) const;

 private:
  std::map<std::string, std::string> files_;
};

}  // namespace fftune
