// A linear layer: y = x·wᵀ (+ bias) (+ residual), and its gradients dx = dy·w, dw = dyᵀ·x, dbias =
// the sum of dy's rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/problem.hpp"
#include "kernels/gemm/product.hpp"
#include "kernels/linear/stages.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in linear.cpp; listed in kernels/catalog.cpp.
const Op& linear_op();

namespace linear {

/// What a problem asks for beside the plain product.
struct Form {
  bool backward = false;
  bool bias = false;         // fwd: y has a bias; bwd: dbias is computed
  bool residual = false;     // fwd: y is added to a residual
  bool accumulates = false;  // bwd: the gradients of the weights and the bias are added to others
};
Form form_of(const Problem& problem);

/// The places of the op's tensors, which are also those that TensorArgument counts by.
struct Places {
  static constexpr std::size_t none = ~std::size_t{0};
  std::size_t dy = none;            // [m, n]
  std::size_t x = none;             // [m, k]
  std::size_t w = none;             // [n, k]
  std::size_t bias = none;          // [n]
  std::size_t residual = none;      // [m, n]
  std::size_t dw_before = none;     // [n, k]; it may be dw itself
  std::size_t dbias_before = none;  // [n]; it may be dbias itself
  std::size_t y = none;             // [m, n]
  std::size_t dx = none;            // [m, k]
  std::size_t dw = none;            // [n, k]
  std::size_t dbias = none;         // [n]
  std::size_t count = 0;
};
Places places_of(const Problem& problem);

/// The stages as products: y, dx, dw.
Product y_product(const Problem& problem);
Product dx_product(const Problem& problem);
Product dw_product(const Problem& problem);

/// Computes the outputs of stage `stage` in float64.
void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
               Parallel& parallel);

std::vector<const Family*> families();
const Family& d_bias_family();
const Family& cpu_d_bias_family();

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts);

}  // namespace linear
}  // namespace fftune
