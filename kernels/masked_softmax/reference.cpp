#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

#include "device/parallel.hpp"
#include "kernels/masked_softmax/masked_softmax.hpp"

namespace fftune::masked_softmax {
namespace {

void forward_row(const Layer& layer, std::int64_t row, const double* x, const double* mask,
                 double* y) {
  const auto allows = [&](std::int64_t j) {
    return j < layer.columns(row) &&
           (mask == nullptr || mask[layer.mask_row(row) * layer.n + j] != 0);
  };
  const double scale = layer.scale;
  double most = -std::numeric_limits<double>::infinity(), sum = 0;
  for (std::int64_t j = 0; j < layer.n; ++j)
    if (allows(j)) most = std::max(most, x[j] * scale);
  // A row whose scores are all -inf, allowed or not, is 0. NaN makes the whole row NaN.
  for (std::int64_t j = 0; j < layer.n; ++j) {
    const bool none = !allows(j) || x[j] * scale == -std::numeric_limits<double>::infinity();
    y[j] = none ? 0 : std::exp(x[j] * scale - most);
    sum += y[j];
  }
  for (std::int64_t j = 0; j < layer.n && sum != 0; ++j) y[j] /= sum;
}

void backward_row(const Layer& layer, std::int64_t row, const double* y, const double* dy,
                  double* dx) {
  const double scale = layer.scale;
  double sum = 0;
  for (std::int64_t j = 0; j < layer.columns(row); ++j) sum += y[j] * dy[j];
  for (std::int64_t j = 0; j < layer.n; ++j)
    dx[j] = j < layer.columns(row) ? scale * y[j] * (dy[j] - sum) : 0;
}

}  // namespace

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const Layer layer = layer_of(problem);
  const auto n = static_cast<std::size_t>(layer.n);
  auto out = large_vector<double>(static_cast<std::size_t>(layer.rows()) * n, parallel);
  const double* const allowed = layer.mask == Mask::boolean ? tensors.at("mask").data() : nullptr;
  const double* const first = tensors.at(layer.backward ? "y" : "x").data();
  const double* const second = layer.backward ? tensors.at("dy").data() : nullptr;
  for_each_row(static_cast<std::size_t>(layer.rows()), n, parallel, [&](std::size_t row) {
    const auto index = static_cast<std::int64_t>(row);
    if (layer.backward)
      backward_row(layer, index, first + row * n, second + row * n, out.data() + row * n);
    else
      forward_row(layer, index, first + row * n, allowed, out.data() + row * n);
  });
  tensors[layer.backward ? "dx" : "y"] = std::move(out);
}

}  // namespace fftune::masked_softmax
