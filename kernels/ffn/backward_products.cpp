// The stages of ffn's backward pass as products, and the families of the engines that compute them.
#include "kernels/ffn/backward.hpp"
#include "kernels/gemm/product_families.hpp"

namespace fftune::ffn {
namespace {

constexpr ProductStage d_hidden{stage_d_hidden, "bwd", d_hidden_product};
constexpr ProductStage d_x{stage_d_x, "bwd", d_x_product};
constexpr ProductStage d_gate_up{stage_d_gate_up, "bwd", d_gate_up_product};
constexpr ProductStage d_down{stage_d_down, "bwd", d_down_product};

Product product_of(const Problem& problem, const GemmShape& shape) {
  Product product;
  product.shape = shape;
  product.dtype = problem.dtype;
  return product;
}

}  // namespace

Product d_hidden_product(const Problem& problem) {
  const Shape shape = shape_of(problem);
  const Places at = places_of(problem);
  const bool again = recomputes(problem);
  Product product = product_of(problem, {.m = shape.m,
                                         .n = shape.h,
                                         .k = shape.d,
                                         .b_transposed = true,
                                         .box_buffers = again ? 2 : 3});
  product.a = {TensorArgument{at.dy}};
  product.b = {TensorArgument{at.w_down}};
  product.c = {TensorArgument{at.d_gate}, TensorArgument{at.d_up}};
  if (!again) product.c.emplace_back(TensorArgument{at.hidden});
  product.gradient = {problem.option("act"), TensorArgument{at.gate}, TensorArgument{at.up}};
  product.follows = again;
  return product;
}

Product d_x_product(const Problem& problem) {
  const Shape shape = shape_of(problem);
  const Places at = places_of(problem);
  Product product = product_of(
      problem, {.m = shape.m, .n = shape.d, .k = shape.h, .b_transposed = true, .terms = 2});
  product.a = {TensorArgument{at.d_gate}, TensorArgument{at.d_up}};
  product.b = {TensorArgument{at.w_gate}, TensorArgument{at.w_up}};
  product.c = {TensorArgument{at.dx}};
  product.follows = true;
  return product;
}

Product d_gate_up_product(const Problem& problem) {
  const Shape shape = shape_of(problem);
  const Places at = places_of(problem);
  Product product = product_of(problem, {.m = shape.h,
                                         .n = shape.d,
                                         .k = shape.m,
                                         .a_transposed = true,
                                         .b_transposed = true,
                                         .results = 2});
  product.a = {TensorArgument{at.d_gate}, TensorArgument{at.d_up}};
  product.b = {TensorArgument{at.x}};
  product.c = {TensorArgument{at.dw_gate}, TensorArgument{at.dw_up}};
  if (form_of(problem).accumulates)
    product.addends = {TensorArgument{at.dw_gate_before}, TensorArgument{at.dw_up_before}};
  product.follows = true;
  return product;
}

Product d_down_product(const Problem& problem) {
  const Shape shape = shape_of(problem);
  const Places at = places_of(problem);
  Product product = product_of(
      problem,
      {.m = shape.d, .n = shape.h, .k = shape.m, .a_transposed = true, .b_transposed = true});
  product.a = {TensorArgument{at.dy}};
  product.b = {TensorArgument{at.hidden}};
  product.c = {TensorArgument{at.dw_down}};
  if (form_of(problem).accumulates) product.addends = {TensorArgument{at.dw_down_before}};
  product.follows = true;
  product.b_is_written = true;
  return product;
}

std::vector<const Family*> backward_families() {
  static const WgmmaProduct hidden_sm90(d_hidden, "d_hidden_sm90",
                                        "dy w_down by wgmma, the gradients of gate and up from it"),
      x_sm90(d_x, "d_x_sm90", "wgmma, d_gate w_gate and d_up w_up in one accumulator"),
      gate_up_sm90(d_gate_up, "d_gate_up_sm90", "wgmma, both products of x in one launch"),
      down_sm90(d_down, "d_down_sm90", "wgmma, dy and hidden read as their transposes");
  static const MmaSyncProduct hidden_sm80(d_hidden, "d_hidden_sm80"), x_sm80(d_x, "d_x_sm80"),
      gate_up_sm80(d_gate_up, "d_gate_up_sm80"), down_sm80(d_down, "d_down_sm80");
  static const FallbackProduct hidden_fallback(d_hidden, "d_hidden_fallback"),
      x_fallback(d_x, "d_x_fallback"), gate_up_fallback(d_gate_up, "d_gate_up_fallback"),
      down_fallback(d_down, "d_down_fallback");
  static const CpuBlasProduct hidden_blas(d_hidden, "cpu_d_hidden_blas"),
      x_blas(d_x, "cpu_d_x_blas"), gate_up_blas(d_gate_up, "cpu_d_gate_up_blas"),
      down_blas(d_down, "cpu_d_down_blas");
  static const CpuPlainProduct hidden_plain(d_hidden, "cpu_d_hidden_plain"),
      x_plain(d_x, "cpu_d_x_plain"), gate_up_plain(d_gate_up, "cpu_d_gate_up_plain"),
      down_plain(d_down, "cpu_d_down_plain");
  return {&hidden_sm90,      &x_sm90,          &gate_up_sm90,
          &down_sm90,        &hidden_sm80,     &x_sm80,
          &gate_up_sm80,     &down_sm80,       &cpu_gate_up_blas_family(),
          &hidden_blas,      &x_blas,          &gate_up_blas,
          &down_blas,        &hidden_fallback, &x_fallback,
          &gate_up_fallback, &down_fallback,   &cpu_gate_up_plain_family(),
          &hidden_plain,     &x_plain,         &gate_up_plain,
          &down_plain};
}

}  // namespace fftune::ffn
