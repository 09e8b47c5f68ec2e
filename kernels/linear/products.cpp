// The stages of linear as products, and the families of the engines that compute them.
#include "kernels/gemm/product_families.hpp"
#include "kernels/linear/linear.hpp"

namespace fftune::linear {
namespace {

constexpr ProductStage y_stage{stage_product, "fwd", y_product};
constexpr ProductStage dx_stage{stage_d_x, "bwd", dx_product};
constexpr ProductStage dw_stage{stage_d_w, "bwd", dw_product};

}  // namespace

Product y_product(const Problem& problem) {
  const Places at = places_of(problem);
  Product product;
  product.shape = {problem.size("m"), problem.size("n"), problem.size("k")};
  product.dtype = problem.dtype;
  product.a = {TensorArgument{at.x}};
  product.b = {TensorArgument{at.w}};
  product.c = {TensorArgument{at.y}};
  const Form form = form_of(problem);
  if (form.bias) product.bias = TensorArgument{at.bias};
  if (form.residual) product.addends = {TensorArgument{at.residual}};
  return product;
}

Product dx_product(const Problem& problem) {
  const Places at = places_of(problem);
  Product product;
  product.shape = {problem.size("m"), problem.size("k"), problem.size("n")};
  product.shape.b_transposed = true;
  product.dtype = problem.dtype;
  product.a = {TensorArgument{at.dy}};
  product.b = {TensorArgument{at.w}};
  product.c = {TensorArgument{at.dx}};
  return product;
}

Product dw_product(const Problem& problem) {
  const Places at = places_of(problem);
  Product product;
  product.shape = {problem.size("n"), problem.size("k"), problem.size("m")};
  product.shape.a_transposed = true;
  product.shape.b_transposed = true;
  product.dtype = problem.dtype;
  product.a = {TensorArgument{at.dy}};
  product.b = {TensorArgument{at.x}};
  product.c = {TensorArgument{at.dw}};
  if (form_of(problem).accumulates) product.addends = {TensorArgument{at.dw_before}};
  product.follows = true;
  return product;
}

std::vector<const Family*> families() {
  static const WgmmaProduct y_sm90(y_stage, "product_sm90", "TMA, wgmma and clusters"),
      dx_sm90(dx_stage, "d_x_sm90", "wgmma, w read as its transpose by descriptors"),
      dw_sm90(dw_stage, "d_w_sm90", "wgmma, dy and x read as their transposes by descriptors");
  static const DecodeProduct y_decode(y_stage, "product_decode");
  static const MmaSyncProduct y_sm80(y_stage, "product_sm80"), dx_sm80(dx_stage, "d_x_sm80"),
      dw_sm80(dw_stage, "d_w_sm80");
  static const FallbackProduct y_fallback(y_stage, "product_fallback"),
      dx_fallback(dx_stage, "d_x_fallback"), dw_fallback(dw_stage, "d_w_fallback");
  static const CpuBlasProduct y_blas(y_stage, "cpu_blas"), dx_blas(dx_stage, "cpu_d_x_blas"),
      dw_blas(dw_stage, "cpu_d_w_blas");
  static const CpuPlainProduct y_plain(y_stage, "cpu_plain"), dx_plain(dx_stage, "cpu_d_x_plain"),
      dw_plain(dw_stage, "cpu_d_w_plain");
  return {&y_decode,    &y_sm90,  &dx_sm90,  &dw_sm90,  &y_sm80,          &dx_sm80,
          &dw_sm80,     &y_blas,  &dx_blas,  &dw_blas,  &y_fallback,      &dx_fallback,
          &dw_fallback, &y_plain, &dx_plain, &dw_plain, &d_bias_family(), &cpu_d_bias_family()};
}

}  // namespace fftune::linear
