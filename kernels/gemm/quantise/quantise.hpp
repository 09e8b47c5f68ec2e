// Products in e4m3 whose tokens the op quantises itself: the option `quantise`, its tensors, and
// the stage that writes e4m3 elements of rows with their f32 scales.
//
//   token   a scale for each row of A, and for each row of the weight (compressed-tensors)
//   block   a scale for each 128 elements of a row of A, and for each 128 x 128 block of the weight
//           (DeepSeek-V3, transformers' FP8Linear)
//
// A scale makes its elements' largest magnitude 448, the largest number of e4m3. It is 1 where no
// magnitude is above 2^-100, and NaN where an element is.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/gemm/operand_stage.hpp"
#include "kernels/gemm/problem.hpp"
#include "registry/op.hpp"

namespace fftune {

/// The option `quantise` of the pass fwd.
OptionField quantise_option();
/// Scaling::none, channel (quantise=token) or block.
Scaling quantised_scaling(const Problem& problem);
inline bool quantises(const Problem& problem) {
  return quantised_scaling(problem) != Scaling::none;
}
/// Op::contradiction() of the option.
std::string quantise_contradiction(const Problem& problem);

/// An operand [rows, k] that a stage quantises, by the names of the op's tensors.
struct QuantisedRows {
  std::string_view from = {};      // of the problem's dtype
  std::string_view elements = {};  // e4m3
  std::string_view scales = {};    // [rows], or [rows, blocks of k]
  std::int64_t rows = 0, k = 0;
  DType dtype = DType::bf16;
  Scaling scaling = Scaling::none;

  /// Elements of a row that share a scale.
  std::int64_t length() const { return scaling == Scaling::block ? scale_block : k; }
  std::int64_t scales_of_row() const { return ceil_div(k, length()); }
};

/// The elements and scales that the stage writes.
std::vector<TensorSpec> quantised_tensors(const QuantisedRows& rows);
/// A weight [n, k] of e4m3 whose numbers have `deviation`, and its scales, which have its name and
/// "_scale".
std::vector<TensorSpec> quantised_weight(std::string_view name, std::int64_t n, std::int64_t k,
                                         Scaling scaling, double deviation);
/// The product of `gemm` with the quantised rows as A.
GemmProblem with_quantised_a(GemmProblem gemm, const QuantisedRows& rows,
                             std::vector<std::string_view> b_scales);

StageSpec quantise_spec(std::string_view name, const QuantisedRows& rows,
                        const std::vector<TensorSpec>& tensors);
/// The stage's float64 reference.
void reference_quantise(const QuantisedRows& rows, ReferenceTensors& tensors, Parallel& parallel);
/// Quantises `values` [rows, columns] in place, `length` elements of a row with one scale: the
/// scales.
std::vector<double> quantise_rows(std::vector<double>& values, std::size_t columns,
                                  std::size_t length, Parallel& parallel);
/// The numbers of quantised elements [rows, columns]: these times their scales, one for each block
/// of block_rows x block_columns elements.
std::vector<double> quantised_numbers(const std::vector<double>& elements,
                                      const std::vector<double>& scales, std::size_t columns,
                                      std::size_t block_rows, std::size_t block_columns,
                                      Parallel& parallel);
/// Those of quantised rows, and of a quantised weight with k input features.
std::vector<double> numbers_of(const QuantisedRows& rows, const ReferenceTensors& tensors,
                               Parallel& parallel);
std::vector<double> numbers_of_weight(const std::string& name, std::int64_t k, Scaling scaling,
                                      const ReferenceTensors& tensors, Parallel& parallel);

using QuantiseStage = OperandStage<QuantisedRows>;
using QuantiseFamily = OperandFamily<QuantisedRows>;
constexpr const char* quantise_summary = "tokens to e4m3 with their scales";
/// Why a family that quantises refuses a problem whose tokens it would leave alone.
std::optional<std::string> refuse_unquantised(const Problem& problem, const DeviceFacts&);
QuantiseFamily quantise_family(const QuantiseStage& stage);
QuantiseFamily cpu_quantise_family(const QuantiseStage& stage);

}  // namespace fftune
