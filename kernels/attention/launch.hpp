// Common host code of attention's CUDA engines: the form of a problem, the parameters of a kernel,
// and the mask as kernels read it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/attention/form.cuh"
#include "kernels/attention/params.cuh"
#include "kernels/common/parameter_fields.hpp"

namespace fftune::attention {

attention_form form_of(const Layer& layer);

/// "fftune::attention_form{.dim = 64, ...}", without the fields that have their defaults.
std::string template_argument(const attention_form& form);

/// "name<form, config>" of a kernel that takes values of another size than keys in a second one,
/// "name_values<form, v_dim, config>". An empty `config`: it has none. Kernels that read e4m3 are
/// "name_e4m3" and "name_values_e4m3".
std::string kernel_of(const Layer& layer, std::string_view name, const std::string& config = "");

/// Why a kernel that reads rows of q, k and v in accesses of attention_access_bytes() cannot, one
/// line.
std::optional<std::string> misaligned_rows(const Layer& layer);

/// Why a kernel whose keys and values have the same layout cannot, one line.
std::optional<std::string> refuse_other_values(const Layer& layer);

/// The reason of a kernel whose space is empty, one line.
std::string no_tiles(const Layer& layer, const DeviceFacts& facts);

/// Why a kernel that reads k and v of q's type alone cannot, one line.
std::optional<std::string> refuse_e4m3(const Layer& layer);

/// Launches of attention kernels that take one struct, while it is filled in: attention_params, or
/// one that has it at `base`.
class Launch {
 public:
  /// Packs a boolean mask first.
  Launch(Program& program, const Problem& problem, const DeviceFacts& facts, std::size_t bytes,
         std::size_t base = 0);

  const Layer& layer() const { return layer_; }
  const Places& places() const { return at_; }

  /// The struct that the kernels take, by its type.
  template <class Params>
  ParameterFields<Params> fields() {
    return ParameterFields<Params>(parameters_);
  }
  /// The attention_params in it.
  ParameterFields<attention_params> attention() {
    return ParameterFields<attention_params>(parameters_, base_);
  }
  /// attention_params::group of a kernel whose CTAs have queries of `packed_heads` heads: those
  /// that read `kv_heads` heads of keys and values.
  void set_group(std::int64_t kv_heads, std::int64_t packed_heads = 1);
  /// Scratch memory of the program, of at least a byte.
  ScratchArgument scratch(std::int64_t bytes, bool zeroed = false);

  /// Appends a kernel "fftune::<expression>" of `file`, with the parameters so far. The reference
  /// is valid until the next step.
  KernelLaunch& append(const std::string& file, const std::string& expression, Dim3 grid,
                       int threads, int shared_bytes = 0);

 private:
  void set_sizes();

  Program& program_;
  const DeviceFacts& facts_;
  std::size_t base_;
  Layer layer_;
  Places at_;
  ParameterStruct parameters_;
};

/// A launch of kernels that take attention_backward_params, with their strides and delta, of lse's
/// shape, in scratch memory.
Launch backward_launch(Program& program, const Problem& problem, const DeviceFacts& facts);

/// A launch of forward kernels that take attention_cache_params where k and v are e4m3, and
/// attention_params otherwise.
Launch forward_launch(Program& program, const Problem& problem, const DeviceFacts& facts);

/// Appends the kernel that computes the gradient of the sinks from delta, if there are sinks; it is
/// in d_sinks_file.
constexpr const char* d_sinks_file = "attention/simt/backward.cu";
void append_d_sinks(Launch& launch);

/// Rows of q, k or v as a tensor map of three dimensions: columns, tokens, and sequences; packed
/// sequences are one; k and v in pages are tokens of a page, and pages.
TensorMapArgument rows_map(const Layer& layer, const Pointer& tensor, std::int64_t row,
                           bool of_keys, int box_tokens, int box_columns);

/// How many heads of k and v, one after the other, have keys and values that fit in half of L2
/// together: 1 at least.
std::int64_t heads_in_l2(const Layer& layer, const DeviceFacts& facts);

/// Heads of k and v of all sequences that are scheduled one after the other.
std::int64_t kv_matrices(const Layer& layer);

/// Whether `ctas` CTAs of `bytes` of shared memory each fit on an SM, beside what the driver
/// reserves for each.
bool fits_shared_memory(const DeviceFacts& facts, std::int64_t bytes, std::int64_t ctas);

/// Tiles of `bm` queries of all heads, `packed_heads` in each; of packed sequences the most that
/// there may be.
std::int64_t query_tiles(const Layer& layer, std::int64_t bm, std::int64_t packed_heads = 1);

/// Queries and keys of a sequence, of packed ones as if they were equally long.
std::int64_t usual_queries(const Layer& layer);
std::int64_t usual_keys(const Layer& layer);

}  // namespace fftune::attention
