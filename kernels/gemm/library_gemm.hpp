// A GemmProblem by the vendor's BLAS, for baselines.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "device/program.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/gemm/problem.hpp"

namespace fftune {

/// The GEMM of all tokens, in their order, with the tensors of one group.
GemmProblem of_group(GemmProblem gemm, std::size_t group);

/// Appends one LibraryGemm for each B operand, K-concatenated pair and output of a GEMM without
/// groups. With a source they add to C itself, as a framework accumulates gradients; the rest of
/// the epilogue is left to the caller. `outputs` replaces C: one for each B operand or output.
void append_library_gemms(Program& program, const GemmProblem& gemm, const TensorPlaces& places,
                          const std::vector<std::string_view>& outputs = {});

}  // namespace fftune
