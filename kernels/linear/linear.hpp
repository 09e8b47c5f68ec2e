// A linear layer: y = x·wᵀ (+ bias) (* y_scale) (+ residual), and its gradients dx = dy·w, dw =
// dyᵀ·x, dbias = the sum of dy's rows. The forward pass takes packed weights too (gemm/packed), and
// weights of e4m3 for tokens that it quantises (gemm/quantise).
#pragma once

#include <vector>

#include "core/problem.hpp"
#include "kernels/gemm/family.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "kernels/gemm/quantise/quantise.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in linear/op.cpp; listed in kernels/catalog.cpp.
const Op& linear_op();

namespace linear {

/// Features that a problem requests besides the plain product.
struct Form {
  bool backward = false;
  bool bias = false;         // fwd: y has a bias; bwd: dbias is computed
  bool y_scale = false;      // fwd: columns of y have a factor each, before the residual is added
  bool residual = false;     // fwd: y is added to a residual
  bool wide = false;         // fwd: y is f32, whatever x and w are
  bool accumulates = false;  // bwd: the gradients of the weights and the bias are added to others
};
Form form_of(const Problem& problem);

/// Computes the outputs of the stage of that name in float64.
void reference(const Problem& problem, const std::string& stage, ReferenceTensors& tensors,
               Parallel& parallel);

std::vector<const Family*> families();

/// The families of the bias gradient; both are fallbacks.
const Family& d_bias_family();
const Family& cpu_d_bias_family();

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

// The stages of linear that are GEMMs; the gradient of the bias (stage_d_bias) is a column sum, and
// packed weights are expanded in a stage before the product, unless one kernel does both. Another
// stage before the product quantises tokens.

constexpr const char* stage_expand = "expand";      // w as a dense weight: weights=int4
constexpr const char* stage_quantise = "quantise";  // x as e4m3: quantise=token, block
constexpr const char* stage_product = "product";    // y = x·wᵀ (+ bias) (* y_scale) (+ residual)
constexpr const char* stage_d_x = "d_x";            // dx = dy·w
constexpr const char* stage_d_w = "d_w";            // dw = dyᵀ·x
constexpr const char* stage_d_bias = "d_bias";      // dbias = the sum of dy's rows

/// Those of the problem's pass, in order.
std::vector<GemmStage> gemm_stages(const Problem& problem);

GemmProblem product_gemm(const Problem& problem);
/// The product with the packed weight itself.
GemmProblem packed_gemm(const Problem& problem);
/// The packed weight, or none.
std::vector<PackedWeight> packed_weights(const Problem& problem);
/// x where the op quantises it.
QuantisedRows quantised_x(const Problem& problem);
GemmProblem d_x_gemm(const Problem& problem);
GemmProblem d_w_gemm(const Problem& problem);

}  // namespace linear
}  // namespace fftune
