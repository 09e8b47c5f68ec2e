// Writing what a sweep found, as soon as it is there, unless --strict refuses it.
#pragma once

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "store/preset_file.hpp"
#include "tuning/tuner.hpp"

namespace fftune::tool {

class Recorder {
 public:
  Recorder(const Catalog& catalog, std::filesystem::path folder, PresetDevice device, bool strict,
           LockWait wait)
      : catalog_(catalog),
        folder_(std::move(folder)),
        device_(std::move(device)),
        strict_(strict),
        wait_(std::move(wait)) {}

  /// Merges the record into the device's file. Throws Error(io).
  void write(const PresetRecord& record);

  const std::set<std::string>& files() const { return files_; }
  /// How many records --strict kept out.
  int refused() const { return refused_; }

 private:
  const Catalog& catalog_;
  std::filesystem::path folder_;
  PresetDevice device_;
  bool strict_;
  LockWait wait_;
  std::set<std::string> files_;
  int refused_ = 0;
};

}  // namespace fftune::tool
