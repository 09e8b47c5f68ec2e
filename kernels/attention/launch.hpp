// What the CUDA families of attention share on the host: the form of a problem, the parameters of a
// kernel, and the mask as kernels read it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/attention/form.cuh"
#include "kernels/attention/params.cuh"

namespace fftune::attention {

attention_form form_of(const Layer& layer);

/// "fftune::attention_form{.dim = 64, ...}", without the fields that have their defaults.
std::string template_argument(const attention_form& form);

/// Why a kernel that reads rows of q, k and v in accesses of 16 bytes cannot, one line.
std::optional<std::string> misaligned_rows(const Layer& layer);

/// A launch of an attention kernel, while its parameters are filled in. Its struct is or begins
/// with attention_params.
class Launch {
 public:
  /// Packs a boolean mask first.
  Launch(Program& program, const Problem& problem, const DeviceFacts& facts, std::size_t bytes);

  const Layer& layer() const { return layer_; }
  const Places& places() const { return at_; }

  void set(std::size_t offset, Argument value) {
    parameters_.fields.push_back({offset, std::move(value)});
  }
  /// Makes a scratch area of the program, and a pointer to it the field's value.
  ScratchArgument set_scratch(std::size_t offset, std::int64_t bytes, bool zeroed = false);

  /// Appends a kernel "fftune::<expression>" of `file`, with the parameters so far. The reference
  /// is valid until the next step.
  KernelLaunch& append(const std::string& file, const std::string& expression, Dim3 grid,
                       int threads, int shared_bytes);

 private:
  void set_tensor(std::size_t offset, std::size_t place);
  void set_sizes();

  Program& program_;
  const DeviceFacts& facts_;
  Layer layer_;
  Places at_;
  ParameterStruct parameters_;
};

/// Rows of q, k or v as a tensor map of three dimensions: columns, tokens, and sequences; packed
/// sequences are one; k and v in pages are tokens of a page, and pages.
TensorMapArgument rows_map(const Layer& layer, std::size_t place, std::int64_t row, bool of_keys,
                           int box_tokens, int box_columns);

/// How many heads of q, one after the other, have keys and values that fit in half of L2: 1 group
/// at least.
int heads_in_l2(const Layer& layer, const DeviceFacts& facts);

}  // namespace fftune::attention
