// The stages of linear that are GEMMs; the gradient of the bias (stage_d_bias) is a column sum.
#pragma once

#include <vector>

#include "kernels/gemm/family.hpp"

namespace fftune::linear {

constexpr const char* stage_product = "product";  // y = x·wᵀ (+ bias) (+ residual)
constexpr const char* stage_d_x = "d_x";          // dx = dy·w
constexpr const char* stage_d_w = "d_w";          // dw = dyᵀ·x
constexpr const char* stage_d_bias = "d_bias";    // dbias = the sum of dy's rows

/// Those of the problem's pass, in order.
std::vector<GemmStage> gemm_stages(const Problem& problem);

GemmProblem product_gemm(const Problem& problem);
GemmProblem d_x_gemm(const Problem& problem);
GemmProblem d_w_gemm(const Problem& problem);

}  // namespace fftune::linear
