// Packed weights of 4 and 8 bits (layout.cuh): the options of ops that have them, their tensors,
// and the stage that expands them to dense ones for products of many tokens.
//
//   int4   w = (q - z) * s, with a scale s, and a zero point z or 8, for each row and group of k
//   mxfp4  w = e2m1 * 2^(s - 127), with a byte s for each row and 32 of k
//   fp8    w = e4m3 * s, with an f32 scale s for each row and group of k
//   int8   w = q * s, likewise
//   nvfp4  w = e2m1 * e4m3 * r, with an e4m3 scale for each row and 16 of k, and an f32 r for each
//   row
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/gemm/operand_stage.hpp"
#include "kernels/gemm/packed/layout.cuh"
#include "kernels/gemm/packed/weight.hpp"
#include "kernels/gemm/problem.hpp"
#include "registry/op.hpp"

namespace fftune {

/// The options `weights`, `group` and `zeros` of the pass fwd.
std::vector<OptionField> packed_options();
PackedFormat packed_format(const Problem& problem);
/// Why a family of packed weights refuses a problem with dense ones; nothing if they are packed.
std::optional<std::string> refuse_dense(const Problem& problem, const DeviceFacts&);
/// The formats, and these in a sentence: "int4, mxfp4 or fp8".
std::vector<std::string> packed_format_names();
std::string packed_names();
/// "int4"
std::string_view code_name(packed_code code);
/// "fftune::packed_code::int4"
std::string device_name(packed_code code);
/// Values of codes of floating point, and of an e8m0 scale.
double e2m1_value(int code);
double e4m3_value(int code);
double e8m0_value(int byte);
/// A float whose bytes are the doubles from 4 * index on, as the reference has tensors of bytes.
void put_float(std::span<double> bytes, std::size_t index, float value);
float float_of(std::span<const double> bytes, std::size_t index);
/// The code of a place in a packed weight whose bytes are doubles, and to add it there.
int packed_code_at(std::span<const double> bytes, const packed_place& place, packed_code code);
void add_packed_code(std::span<double> bytes, const packed_place& place, packed_code code,
                     int value);
/// The value of a code before its scale; `zero`: its zero point, with int4 alone.
double code_value(packed_code code, int bits, int zero = 8);
/// Op::contradiction() of the options, for a weight that has `k` input features, which `name` says.
std::string packed_contradiction(const Problem& problem, std::string_view name, std::int64_t k);

/// Summaries of the families that read packed weights themselves.
constexpr const char* packed_sm90_summary = "packed weights, expanded in registers for wgmma";
constexpr const char* packed_decode_summary =
    "packed weights for up to 64 tokens, at the speed of reading them once";

/// Completes the names and the size in `weight` with the problem's format.
PackedWeight packed_weight(const Problem& problem, PackedWeight weight);
/// The product with the packed weights themselves, instead of those that the stage before expands.
GemmProblem reads_packed(GemmProblem gemm, std::vector<PackedWeight> weights, bool follows = false);
/// Why a kernel of packed weights cannot take the groups of rows.
std::optional<std::string> refuse_packed_groups(const GemmProblem& gemm);

/// The tensors of the packed weight, in order; `deviation`: of the dense weights.
std::vector<TensorSpec> packed_tensors(const PackedWeight& weight, double deviation);
TensorSpec expanded_tensor(const PackedWeight& weight);

/// A stage that expands weights.
StageSpec expand_spec(std::string_view name, const std::vector<PackedWeight>& weights,
                      const std::vector<TensorSpec>& tensors);
/// Its float64 reference.
void reference_expand(const std::vector<PackedWeight>& weights, ReferenceTensors& tensors,
                      Parallel& parallel);

using ExpandStage = OperandStage<std::vector<PackedWeight>>;
using ExpandFamily = OperandFamily<std::vector<PackedWeight>>;
ExpandFamily expand_family(const ExpandStage& stage);
ExpandFamily cpu_expand_family(const ExpandStage& stage);

/// Why the header is not that of a packed weight [n, k] in this layout, one line; empty: it is.
std::string packed_header_error(const void* header, packed_code code, std::int64_t n,
                                std::int64_t k);
void write_packed_header(void* header, packed_code code, std::int64_t n, std::int64_t k);

}  // namespace fftune
