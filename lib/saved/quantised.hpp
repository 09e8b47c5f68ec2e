// Weights that checkpoints hold in few bits beside scales, read as dense ones.
//
// Formats, with n output and k input features, groups of g input features and G = ceil(k / g):
//
//   GPTQ, AWQ             w = (q - z) * s, integers of 4 bits (GPTQ also 8), s and z [G, n]
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
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "saved/checked_tensor.hpp"
#include "saved/header.hpp"

namespace fftune {

struct JsonValue;

/// How kernels with packed weights take a quantised weight.
struct CodeFormat {
  std::string weights = {};  // "int4", "mxfp4", "fp8", "int8" or "nvfp4"
  bool zeros = false;        // int4: whether a zero point is not 8
  /// Neighbours of a row that may share a scale, the most first; 0: the whole row.
  std::vector<std::int64_t> groups = {};
  std::string unfit = {};  // why kernels have no such format; empty: they have it
};

/// An element: the value of its code, less `zero` with int4, times the scales.
struct Code {
  int bits = 0;
  int zero = 8;
  double scale = 1;  // with mxfp4 and nvfp4 the byte that stands for it
  double row_scale = 1;
};

/// One weight of a quantised checkpoint.
class QuantisedWeight {
 public:
  virtual ~QuantisedWeight() = default;

  /// The dense weight: its name, "….weight", and shape. Its element type is that in which a model
  /// would compute with it.
  const SavedTensor& dense() const { return dense_; }
  /// Why it cannot be read, one line; empty: it can. The shape of dense() is then unknown, and each
  /// of the calls below throws Error(invalid_input) with this line.
  virtual std::string unreadable() const { return ""; }

  /// Elements of the dense weight from `first` on, row-major, each rounded once to float64. Any
  /// thread may call it. The first call reads the saved tensors. Throws Error(invalid_input) for
  /// scales that are not finite and for groups that are not there.
  void decode(const TensorReader& read, std::size_t first, std::span<double> values) const;

  /// Reads no codes.
  virtual CodeFormat format(const TensorReader& read) const = 0;
  /// Codes of a row from its first element on. The weight is [rows, k] here: rows are outputs, of
  /// all experts where there are several. Any thread may call it, as decode().
  void codes(const TensorReader& read, std::size_t row, std::span<Code> codes) const;
  std::int64_t code_columns() const;

 protected:
  explicit QuantisedWeight(SavedTensor dense) : dense_(std::move(dense)) {}

  virtual void load(const TensorReader& read) = 0;
  /// Bits as kernels take them.
  virtual Code code_at(std::size_t row, std::size_t column) const = 0;
  /// An element of row-major [rows, columns]; the rows of all experts where there are several.
  virtual double at(std::size_t row, std::size_t column) const = 0;

  SavedTensor dense_;
  bool transposed_ = false;  // dense() is [experts, columns, rows]

 private:
  void load_once(const TensorReader& read) const;

  mutable std::once_flag loaded_;
};

/// Every quantised weight among the tensors of a checkpoint with this config.json. Each module has
/// settings of its own where the configuration allows it: bits and groups are those of its tensors.
/// A weight whose layout is not known, or whose tensors contradict each other, is unreadable().
/// Throws Error(invalid_input), one line without the file's name, if the layout is not known and no
/// weight has it.
std::vector<std::shared_ptr<const QuantisedWeight>> find_quantised_weights(
    const JsonValue& config, const std::map<std::string, SavedTensor, std::less<>>& tensors,
    const TensorReader& read);

}  // namespace fftune
