// A file that is written beside the one it is to replace.
#pragma once

#include <filesystem>
#include <string_view>

namespace fftune {

/// The two halves of replace_file(): writes and syncs the temporary file, and renames it over the
/// file when it is published. What is not published leaves no trace.
class StagedFile {
 public:
  StagedFile(const std::filesystem::path& path, std::string_view text);
  ~StagedFile();
  StagedFile(const StagedFile&) = delete;
  StagedFile& operator=(const StagedFile&) = delete;

  void publish();

 private:
  std::filesystem::path path_;  // what is replaced, where the path given is a link
  std::filesystem::path temporary_;
};

}  // namespace fftune
