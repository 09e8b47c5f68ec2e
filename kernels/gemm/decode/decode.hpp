// Definitions that the decode engine and the fused decode engine share.
#pragma once

#include <optional>
#include <string>

#include "kernels/gemm/problem.hpp"

namespace fftune {

/// The rows of A in the tensor core's operand: 8 or 16.
int decode_tokens(const GemmProblem& gemm);

/// Why neither of them can implement a GEMM, its epilogue and its alignment aside.
std::optional<std::string> no_decode(const GemmProblem& gemm);

}  // namespace fftune
