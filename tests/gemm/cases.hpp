// The list of GEMMs that every engine is tested with: forms, majors, epilogues, groupings and
// types, at ragged sizes. An engine skips those that it refuses.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/problem.hpp"
#include "registry/op.hpp"

namespace fftune::test {

struct GemmCase {
  std::string name;
  GemmProblem gemm;
  /// With groups: the number of tokens of each, and of sorted rows that come before those of group
  /// 0 and belong to no group. The remaining tokens belong to no group either.
  std::vector<std::int64_t> group_sizes = {};
  std::int64_t before_groups = 0;
};

/// f32, bf16 or fp16. Extents that are contiguous in memory are rounded up to a multiple of
/// `aligned`.
std::vector<GemmCase> gemm_cases(DType dtype, std::int64_t aligned = 1);
/// fp8 with scales: of tensors and of blocks, with results in bf16 or quantised.
std::vector<GemmCase> quantised_gemm_cases();
/// The same of groups, whose B operands have scales of their own.
std::vector<GemmCase> grouped_quantised_gemm_cases();

/// Routed groups of all numbers of rows up to several tiles, in sorted rows or not.
std::vector<GemmCase> uneven_gemm_cases(DType dtype);

/// The tensors of a GEMM, in the order of their first mention, as an op would list them.
std::vector<TensorSpec> tensors_of(const GemmProblem& gemm);
std::vector<TensorSpec> tensors_of_chain(const GemmChain& chain);

/// Their values in float64, inputs drawn and rounded to their types, outputs NaN.
ReferenceTensors draw_inputs(const GemmCase& gemm_case, std::uint64_t seed);
/// The GEMM's results before any rounding; elements that it does not write stay NaN. `magnitudes`
/// are the sums of absolute products, of C's tensors: what errors are relative to.
void reference_gemm(const GemmProblem& gemm, ReferenceTensors& tensors,
                    ReferenceTensors& magnitudes);

/// The error in the outputs of an engine, one line; nothing if all are within rounding and
/// `accumulation` times the magnitudes. `values` reads a tensor that the engine left behind;
/// elements that the reference does not write must still hold their NaN.
std::optional<std::string> wrong_output(
    const GemmProblem& gemm, const ReferenceTensors& expected, const ReferenceTensors& magnitudes,
    const std::function<std::vector<double>(const std::string&)>& values,
    double accumulation = 4e-6);

/// Both GEMMs of a gated layer, gate_up and then down: y = (act(x w_gateᵀ) ⊙ (x w_upᵀ)) w_downᵀ
/// with x [m,d] and silu.
GemmChain gated_layer(DType dtype, std::int64_t m, std::int64_t d, std::int64_t h);

/// The device of sm_90a.
inline const DeviceFacts& hopper() {
  static const DeviceFacts facts = facts_of_architecture("sm_90a");
  return facts;
}

}  // namespace fftune::test
