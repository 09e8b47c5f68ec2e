// A saved model: its tensors by name, in one safetensors file or in several with an index. Where
// its config.json says that weights are quantised, their dense forms are among the tensors.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/file_access.hpp"
#include "saved/header.hpp"
#include "saved/quantised.hpp"

namespace fftune {

class SavedModel {
 public:
  struct Tensor {
    SavedTensor saved;
    std::size_t file = 0;  // which of the model's
    /// Where a scale belongs to each element. `saved` is then the dense weight, which is in no
    /// file; a weight whose elements are fp8 or int8 is there as it is saved. The shape of one that
    /// is unreadable() is unknown.
    std::shared_ptr<const QuantisedWeight> quantised = {};
  };
  using Tensors = std::map<std::string, Tensor, std::less<>>;

  /// `path` is a .safetensors file, an index (*.safetensors.index.json), or a folder with
  /// model.safetensors.index.json or with .safetensors files. Throws Error(io) or
  /// Error(invalid_input), one line that names the file.
  explicit SavedModel(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  /// Where config.json would be.
  std::filesystem::path folder() const;
  /// config.json beside the tensors; null if there is none.
  const JsonValue* config() const { return config_.get(); }
  const Tensors& tensors() const { return tensors_; }

  /// Null if there is none of that name.
  const Tensor* find(std::string_view name) const;
  /// Throws Error(invalid_input) that says why, if a quantised weight is unreadable().
  void require_readable(const Tensor& tensor) const;
  /// Throws Error(invalid_input) that suggests the nearest name.
  const Tensor& at(std::string_view name) const;

  /// Reads `count` elements of a tensor from `first` on, rounded to `dtype`. Those of a quantised
  /// weight have their scales applied, unless it is saved in `dtype`. Throws Error(io) that names
  /// the file, also where it has been cut short since it was opened; Error(invalid_input) for codes
  /// with scales in a format that is not known. Any thread may call it.
  void read(const Tensor& tensor, std::size_t first, DType dtype, std::byte* out,
            std::size_t count) const;

  /// How kernels take a tensor that is `quantised`, and codes of its row from the first on. They
  /// throw as read() does.
  CodeFormat code_format(const Tensor& tensor) const;
  void read_codes(const Tensor& tensor, std::size_t row, std::span<Code> codes) const;

 private:
  template <typename Call>
  auto of_quantised(const Call& call) const;
  void add_quantised();
  void expect_no_codes(const SavedTensor& tensor) const;
  Tensors::const_iterator scales_of(const std::string& name) const;
  TensorReader packed_reader() const;
  void read_bytes(const Tensor& tensor, std::size_t first, std::span<std::byte> out) const;
  void add(const std::filesystem::path& file);
  void add_index(const std::filesystem::path& index);

  std::filesystem::path path_;
  struct File {
    std::filesystem::path path;
    InputFile content;
  };
  std::shared_ptr<const JsonValue> config_;
  std::vector<File> files_;
  Tensors tensors_;
  Tensors packed_;  // what quantised weights are read from
};

}  // namespace fftune
