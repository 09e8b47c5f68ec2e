// Layer normalisation (Ba, Kiros and Hinton 2016, arXiv 1607.06450):
// y = x̂ ⊙ w + b, x̂ = (x − mean(x)) / sqrt(var(x) + eps), mean and variance over a row of d
// features, the variance with a denominator of d. Nothing is rounded on the way.
//
// With the residual added, sum = x + residual rounded to the dtype is written too and is what is
// normalised, as in rmsnorm. The backward pass then takes that sum in the place of x, and the
// gradient of the sum that comes from beyond the layer:
//   g = dy ⊙ w    dx = (g − mean(g) − x̂ mean(g x̂)) / sqrt(var + eps) + dsum
//   dw = the sum over rows of dy ⊙ x̂    db = the sum over rows of dy
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/problem.hpp"
#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in layernorm.cpp; listed in kernels/catalog.cpp.
const Op& layernorm_op();

namespace layernorm {

constexpr const char* stage_forward = "forward";
constexpr const char* stage_backward = "backward";

constexpr std::int64_t most_features = 65536;

/// A problem's sizes and options, read once.
struct Layer {
  std::int64_t m = 0;  // tokens
  std::int64_t d = 0;  // features of a token
  float eps = 0;
  bool backward = false;
  bool adds = false;  // the residual is added
  DType dtype = DType::f32;
};
Layer layer_of(const Problem& problem);

/// The places of the op's tensors. Forward: x, residual [m, d] if it is added, w, b [d], y, sum as
/// residual. Backward: x (the sum where the residual was added), w, dy, dsum, dx, dw, db.
TensorPlaces places_of(const Layer& layer);

/// The definition in float64, of either pass.
void reference(const Layer& layer, ReferenceTensors& tensors, Parallel& parallel);

std::vector<const Family*> cuda_families();
std::vector<const Family*> cpu_families();

}  // namespace layernorm
}  // namespace fftune
