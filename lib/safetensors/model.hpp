// A saved model: its tensors by name, in one safetensors file or in several with an index.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/file_access.hpp"
#include "safetensors/header.hpp"

namespace fftune {

class SavedModel {
 public:
  struct Tensor {
    SavedTensor saved;
    std::size_t file = 0;  // which of the model's
  };

  /// `path` is a .safetensors file, an index (*.safetensors.index.json), or a folder with
  /// model.safetensors.index.json or with .safetensors files. Throws Error(io) or
  /// Error(invalid_input), one line that names the file.
  explicit SavedModel(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  /// Where config.json would be.
  std::filesystem::path folder() const;
  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }

  /// Null if there is none of that name.
  const Tensor* find(std::string_view name) const;
  /// Throws Error(invalid_input) that suggests the nearest name.
  const Tensor& at(std::string_view name) const;

  /// Reads elements of a tensor from `first` on, as many as `out` has room for, as they are saved.
  /// Throws Error(io) that names the file, also where it has been cut short since it was opened.
  /// Any thread may call it.
  void read(const Tensor& tensor, std::size_t first, std::span<std::byte> out) const;

 private:
  void add(const std::filesystem::path& file);
  void add_index(const std::filesystem::path& index);

  std::filesystem::path path_;
  struct File {
    std::filesystem::path path;
    InputFile content;
  };
  std::vector<File> files_;
  std::map<std::string, Tensor, std::less<>> tensors_;
};

}  // namespace fftune
