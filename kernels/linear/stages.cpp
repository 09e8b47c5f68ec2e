#include "kernels/linear/stages.hpp"

#include "kernels/linear/linear.hpp"

namespace fftune::linear {
namespace {

constexpr GemmStage product{stage_product, linear_op, product_gemm};
constexpr GemmStage d_x{stage_d_x, linear_op, d_x_gemm};
constexpr GemmStage d_w{stage_d_w, linear_op, d_w_gemm};

/// C [m,n] of sums of k products, with the problem's types.
GemmProblem gemm_of(const Problem& problem, const char* m, const char* n, const char* k) {
  return {.m = problem.size(m),
          .n = problem.size(n),
          .k = problem.size(k),
          .dtype = problem.dtype,
          .c_dtype = problem.dtype,
          .wide_dtype = problem.dtype};
}

}  // namespace

std::vector<GemmStage> gemm_stages(const Problem& problem) {
  if (problem.pass == "fwd") return {product};
  return {d_x, d_w};
}

GemmProblem product_gemm(const Problem& problem) {
  const Form form = form_of(problem);
  GemmProblem gemm = gemm_of(problem, "m", "n", "k");
  gemm.a = {{"x"}};
  gemm.b = {{"w"}};
  gemm.c = {{"y"}};
  if (form.bias) gemm.epilogue.bias = "bias";
  if (form.residual) gemm.epilogue.source = {{"residual"}};
  return gemm;
}

GemmProblem d_x_gemm(const Problem& problem) {
  GemmProblem gemm = gemm_of(problem, "m", "k", "n");
  gemm.b_major = Major::mn;
  gemm.a = {{"dy"}};
  gemm.b = {{"w"}};
  gemm.c = {{"dx"}};
  return gemm;
}

GemmProblem d_w_gemm(const Problem& problem) {
  GemmProblem gemm = gemm_of(problem, "n", "k", "m");
  gemm.a_major = gemm.b_major = Major::mn;
  gemm.a = {{"dy"}};
  gemm.b = {{"x"}};
  gemm.c = {{"dw"}};
  if (form_of(problem).accumulates) gemm.epilogue.source = {{"dw_before"}};
  gemm.follows = true;
  return gemm;
}

}  // namespace fftune::linear
