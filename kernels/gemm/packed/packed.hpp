// Packed weights of 4 bits (layout.cuh): the options of ops that have them, their tensors, and the
// stage that expands them to dense ones for products of many tokens.
//
//   int4   w = (q - z) * s, with a scale s, and a zero point z or 8, for each row and group of k
//   mxfp4  w = e2m1 * 2^(s - 127), with a byte s for each row and 32 of k
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/gemm/packed/layout.cuh"
#include "kernels/gemm/packed/weight.hpp"
#include "registry/op.hpp"

namespace fftune {

/// The options `weights`, `group` and `zeros` of the pass fwd.
std::vector<OptionField> packed_options();
PackedFormat packed_format(const Problem& problem);
/// Why a family of packed weights refuses a problem with dense ones; nothing if they are packed.
std::optional<std::string> refuse_dense(const Problem& problem);
/// "fftune::packed_code::int4"
std::string_view device_name(packed_code code);
/// Values of the format mxfp4: of an e2m1 code, and of an e8m0 scale.
double e2m1_value(int code);
double e8m0_value(int byte);
/// Op::contradiction() of the options, for a weight that has `k` input features, which `name` says.
std::string packed_contradiction(const Problem& problem, std::string_view name, std::int64_t k);

/// The tensors of the packed weight, in order; `deviation`: of the dense weights.
std::vector<TensorSpec> packed_tensors(const PackedWeight& weight, double deviation);
TensorSpec expanded_tensor(const PackedWeight& weight);

/// A stage that expands weights.
StageSpec expand_spec(std::string_view name, const std::vector<PackedWeight>& weights,
                      const std::vector<TensorSpec>& tensors);
/// Its float64 reference.
void reference_expand(const std::vector<PackedWeight>& weights, ReferenceTensors& tensors,
                      Parallel& parallel);

/// A stage of an op that expands the weights of the next one.
struct ExpandStage {
  const char* name;  // "expand"
  const Op& (*op)() = nullptr;
  /// Only called for problems that have the stage.
  std::vector<PackedWeight> (*weights)(const Problem&) = nullptr;
};

/// The families of a stage, both fallbacks; `name` is a literal.
std::unique_ptr<const Family> expand_family(const ExpandStage& stage, const char* name);
std::unique_ptr<const Family> cpu_expand_family(const ExpandStage& stage, const char* name);

/// Why the header is not that of a packed weight [n, k] in this layout, one line; empty: it is.
std::string packed_header_error(const void* header, packed_code code, std::int64_t n,
                                std::int64_t k);
void write_packed_header(void* header, packed_code code, std::int64_t n, std::int64_t k);

}  // namespace fftune
