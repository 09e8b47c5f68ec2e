// A folder of a test's own in the temporary folder, gone with it.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

namespace fftune::testing {

class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// Whether other users may pass through the folders above it: not so below one of mode 700.
  bool others_can_reach() const;

 private:
  std::filesystem::path path_;
};

}  // namespace fftune::testing
