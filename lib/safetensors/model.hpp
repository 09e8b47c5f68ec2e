// A saved model: its tensors by name, in one safetensors file or in several with an index.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "safetensors/header.hpp"

namespace fftune {

/// A file as memory, which the system reads where it is touched: a model of 100 GB takes none. It
/// must not be cut short by others while it is open.
class MappedFile {
 public:
  /// Throws Error(io) with the path.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

class SavedModel {
 public:
  struct Tensor {
    SavedTensor saved;
    const std::byte* data = nullptr;
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

 private:
  void add(const std::filesystem::path& file);
  void add_index(const std::filesystem::path& index);

  std::filesystem::path path_;
  std::vector<std::unique_ptr<MappedFile>> files_;
  std::map<std::string, Tensor, std::less<>> tensors_;
};

}  // namespace fftune
