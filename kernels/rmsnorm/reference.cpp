#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "device/blocks.hpp"
#include "device/large_vector.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"

namespace fftune::rmsnorm {
namespace {

double factor(const Layer& layer, double weight) {
  return layer.convention == Convention::gemma ? 1 + weight : weight;
}

/// x̂ as it is multiplied.
double normalised(const Layer& layer, double value) {
  const bool rounds = layer.convention == Convention::llama && !layer.quantises();
  return rounds ? round_to(layer.dtype, value) : value;
}

double reciprocal_deviation(const Layer& layer, const double* row) {
  double squares = 0;
  for (std::int64_t i = 0; i < layer.d; ++i) squares += row[i] * row[i];
  return 1 / std::sqrt(squares / static_cast<double>(layer.d) + double{layer.eps});
}

/// Divides a row by its scale, which it returns.
double quantise(const Layer& layer, double* row) {
  double largest = 0;
  for (std::int64_t i = 0; i < layer.d; ++i) largest = std::max(largest, std::abs(row[i]));
  const double limit = layer.out_dtype == DType::fp8 ? 448 : 127;
  const double scale = largest > std::ldexp(1.0, -100) ? largest / limit : 1;
  for (std::int64_t i = 0; i < layer.d; ++i) row[i] /= scale;
  return scale;
}

void forward(const Layer& layer, ReferenceTensors& tensors, Parallel& parallel) {
  const auto d = static_cast<std::size_t>(layer.d);
  const auto m = static_cast<std::size_t>(layer.m);
  const auto& w = tensors.at("w");
  auto rows = large_copy(tensors.at("x"), parallel);
  auto y = large_vector<double>(rows.size(), parallel);
  std::vector<double> rstd(m);
  std::vector<double> scale(m);
  std::vector<double> sum;
  if (layer.adds) sum = large_vector<double>(rows.size(), parallel);
  for_each_row(m, d, parallel, [&](std::size_t row) {
    double* const x = rows.data() + row * d;
    if (layer.adds) {
      const double* const residual = tensors.at("residual").data() + row * d;
      for (std::size_t i = 0; i < d; ++i) {
        sum[row * d + i] = x[i] + residual[i];
        x[i] = round_to(layer.dtype, sum[row * d + i]);
      }
    }
    rstd[row] = reciprocal_deviation(layer, x);
    for (std::size_t i = 0; i < d; ++i)
      y[row * d + i] = normalised(layer, x[i] * rstd[row]) * factor(layer, w[i]);
    if (layer.adds_after)
      for (std::size_t i = 0; i < d; ++i) y[row * d + i] += tensors.at("residual")[row * d + i];
    if (layer.quantises()) scale[row] = quantise(layer, y.data() + row * d);
  });
  tensors["y"] = std::move(y);
  if (layer.saves) tensors["rstd"] = std::move(rstd);
  if (layer.adds) tensors["sum"] = std::move(sum);
  if (layer.quantises()) tensors["scale"] = std::move(scale);
}

void backward(const Layer& layer, ReferenceTensors& tensors, Parallel& parallel) {
  const auto d = static_cast<std::size_t>(layer.d);
  const auto m = static_cast<std::size_t>(layer.m);
  const auto& x = tensors.at("x");
  const auto& w = tensors.at("w");
  const auto& dy = tensors.at("dy");
  std::vector<double> rstd(m);
  auto dx = large_vector<double>(x.size(), parallel);
  for_each_row(m, d, parallel, [&](std::size_t row) {
    const std::size_t first = row * d;
    const double r =
        layer.saves ? tensors.at("rstd")[row] : reciprocal_deviation(layer, x.data() + first);
    double product = 0;
    for (std::size_t i = 0; i < d; ++i)
      product += factor(layer, w[i]) * dy[first + i] * x[first + i] * r;
    const double mean = product / static_cast<double>(layer.d);
    for (std::size_t i = 0; i < d; ++i) {
      dx[first + i] = r * (factor(layer, w[i]) * dy[first + i] - x[first + i] * r * mean);
      if (layer.adds) dx[first + i] += tensors.at("dsum")[first + i];
    }
    rstd[row] = r;
  });
  std::vector<double> dw(d);
  constexpr std::size_t columns = 64;  // of a task: every row's part of it is a few cache lines
  parallel.run(static_cast<int>((d + columns - 1) / columns), parallel.max_threads(),
               [&](int task) {
                 const std::size_t begin = static_cast<std::size_t>(task) * columns;
                 const std::size_t end = std::min(d, begin + columns);
                 for (std::size_t row = 0; row < m; ++row)
                   for (std::size_t i = begin; i < end; ++i)
                     dw[i] += dy[row * d + i] * x[row * d + i] * rstd[row];
               });
  tensors["dx"] = std::move(dx);
  tensors["dw"] = std::move(dw);
}

}  // namespace

void reference(const Layer& layer, ReferenceTensors& tensors, Parallel& parallel) {
  if (layer.backward)
    backward(layer, tensors, parallel);
  else
    forward(layer, tensors, parallel);
}

}  // namespace fftune::rmsnorm
