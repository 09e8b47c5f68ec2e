// Weights that checkpoints hold in few bits beside scales, read as dense ones.
//
// Formats, with n output and k input features, groups of g input features and G = ceil(k / g):
//
//   GPTQ, AWQ             w = (q - z) * s, integers of 4 bits, s [G, n] and z [G, n]
//   compressed-tensors    the same with s [n, G]; int8 and fp8 with a scale of each row, tensor or
//                         block; the two of 4-bit floats below
//   mxfp4                 w = e2m1 * 2^(byte - 127) for each 32 input features
//   nvfp4                 w = e2m1 * e4m3 for each 16, times or through one scale of the tensor
//   fp8, bitsandbytes     fp8 or int8 with a scale of each block or row
//
// The layouts are those of the packages that write them: GPTQModel, AutoAWQ, compressed-tensors,
// gpt-oss, NVIDIA's ModelOpt, DeepSeek and bitsandbytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "safetensors/header.hpp"

namespace fftune {

struct JsonValue;

/// One weight of a quantised checkpoint.
class QuantisedWeight {
 public:
  /// The bytes of a saved tensor.
  using ReadTensor = std::function<std::vector<std::byte>(std::string_view name)>;

  virtual ~QuantisedWeight() = default;

  /// The dense weight: its name, "….weight", and shape. Its element type is that in which a model
  /// would compute with it.
  const SavedTensor& dense() const { return dense_; }

  /// Elements of the dense weight from `first` on, row-major, each rounded once to float64. Any
  /// thread may call it. The first call reads the saved tensors. Throws Error(invalid_input) for
  /// scales that are not finite and for groups that are not there.
  void decode(const ReadTensor& read, std::size_t first, std::span<double> values) const;

 protected:
  explicit QuantisedWeight(SavedTensor dense) : dense_(std::move(dense)) {}

  virtual void load(const ReadTensor& read) = 0;
  /// An element of row-major [rows, columns]; the rows of all experts where there are several.
  virtual double at(std::size_t row, std::size_t column) const = 0;

  SavedTensor dense_;
  bool transposed_ = false;  // dense() is [experts, columns, rows]

 private:
  mutable std::once_flag loaded_;
};

/// Every quantised weight among the tensors of a checkpoint with this config.json. Throws
/// Error(invalid_input), one line without the file's name, for a layout that is not known and for
/// tensors that contradict each other.
std::vector<std::shared_ptr<const QuantisedWeight>> find_quantised_weights(
    const JsonValue& config, const std::map<std::string, SavedTensor, std::less<>>& tensors,
    const QuantisedWeight::ReadTensor& read);

}  // namespace fftune
