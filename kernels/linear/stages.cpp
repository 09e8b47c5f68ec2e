#include "kernels/linear/linear.hpp"

namespace fftune::linear {
namespace {

constexpr ExpandStage expansion{stage_expand, linear_op, packed_weights};
constexpr GemmStage expand{stage_expand, linear_op, packed_gemm};
constexpr QuantiseStage quantisation{stage_quantise, linear_op, quantised_x};
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
  if (packed_format(problem).packed) {
    gemm.b = {{"w_dense"}};
    gemm.follows = gemm.b_depends = true;
  }
  if (form.wide) gemm.c_dtype = DType::f32;
  if (form.bias) gemm.epilogue.row(row_broadcast::bias) = "bias";
  if (form.y_scale) gemm.epilogue.row(row_broadcast::scale) = "y_scale";
  if (form.residual) gemm.epilogue.source = {{"residual"}};
  if (quantises(problem)) return with_quantised_a(gemm, quantised_x(problem), {"w_scale"});
  return gemm;
}

GemmProblem packed_gemm(const Problem& problem) {
  return reads_packed(product_gemm(problem), packed_weights(problem));
}

std::vector<PackedWeight> packed_weights(const Problem& problem) {
  if (!packed_format(problem).packed) return {};
  return {packed_weight(
      problem, {"w", "w_scale", "w_zero", "w_dense", problem.size("n"), problem.size("k")})};
}

QuantisedRows quantised_x(const Problem& problem) {
  return {.from = "x",
          .elements = "x_quantised",
          .scales = "x_scale",
          .rows = problem.size("m"),
          .k = problem.size("k"),
          .dtype = problem.dtype,
          .scaling = quantised_scaling(problem)};
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

std::vector<const Family*> families() {
  static const auto gemms = families_of(
      {{packed_sm90_engine, {expand, product}, "packed_sm90", packed_sm90_summary},
       {packed_decode_engine, {expand, product}, "packed_decode", packed_decode_summary},
       {decode_engine,
        {product},
        "product_decode",
        "up to 16 tokens, at the speed of reading the weights once"},
       {sm90_engine, {product}, "product_sm90", "TMA, wgmma and clusters"},
       {sm90_engine, {d_x}, "d_x_sm90", "wgmma, w read as its transpose by descriptors"},
       {sm90_engine, {d_w}, "d_w_sm90", "wgmma, dy and x read as their transposes by descriptors"},
       {sm80_engine, {product, d_x, d_w}, "{}_sm80", mma_sync_summary},
       {cpu_blas_engine, {product}, "cpu_blas", blas_summary},
       {cpu_blas_engine, {d_x, d_w}, "cpu_{}_blas", blas_summary},
       {simt_engine, {product, d_x, d_w}, "{}_fallback", simt_summary},
       {cpu_plain_engine, {product}, "cpu_plain", plain_summary},
       {cpu_plain_engine, {d_x, d_w}, "cpu_{}_plain", plain_summary}});
  static const auto expansions = on_both(expand_family, cpu_expand_family, {expansion});
  static const auto quantisations = on_both(quantise_family, cpu_quantise_family, {quantisation});
  auto families = addresses_of(gemms, expansions, quantisations);
  append(families, {&d_bias_family(), &cpu_d_bias_family()});
  return families;
}

}  // namespace fftune::linear
