#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "device/blocks.hpp"
#include "device/large_vector.hpp"
#include "kernels/layernorm/layernorm.hpp"

namespace fftune::layernorm {
namespace {

struct Moments {
  double mean, rstd;
};

Moments moments_of(const Layer& layer, const double* row) {
  double sum = 0, squares = 0;
  for (std::int64_t i = 0; i < layer.d; ++i) sum += row[i];
  const double mean = sum / static_cast<double>(layer.d);
  for (std::int64_t i = 0; i < layer.d; ++i) squares += (row[i] - mean) * (row[i] - mean);
  return {mean, 1 / std::sqrt(squares / static_cast<double>(layer.d) + double{layer.eps})};
}

void forward(const Layer& layer, ReferenceTensors& tensors, Parallel& parallel) {
  const auto d = static_cast<std::size_t>(layer.d);
  const auto& w = tensors.at("w");
  const auto& b = tensors.at("b");
  auto rows = large_copy(tensors.at("x"), parallel);
  auto y = large_vector<double>(rows.size(), parallel);
  std::vector<double> sum;
  if (layer.adds) sum = large_vector<double>(rows.size(), parallel);
  for_each_row(static_cast<std::size_t>(layer.m), d, parallel, [&](std::size_t row) {
    double* const x = rows.data() + row * d;
    if (layer.adds) {
      const double* const residual = tensors.at("residual").data() + row * d;
      for (std::size_t i = 0; i < d; ++i) {
        sum[row * d + i] = x[i] + residual[i];
        x[i] = round_to(layer.dtype, sum[row * d + i]);
      }
    }
    const auto [mean, rstd] = moments_of(layer, x);
    for (std::size_t i = 0; i < d; ++i) y[row * d + i] = (x[i] - mean) * rstd * w[i] + b[i];
  });
  tensors["y"] = std::move(y);
  if (layer.adds) tensors["sum"] = std::move(sum);
}

void backward(const Layer& layer, ReferenceTensors& tensors, Parallel& parallel) {
  const auto d = static_cast<std::size_t>(layer.d);
  const auto m = static_cast<std::size_t>(layer.m);
  const auto& x = tensors.at("x");
  const auto& w = tensors.at("w");
  const auto& dy = tensors.at("dy");
  std::vector<Moments> moments(m);
  auto dx = large_vector<double>(x.size(), parallel);
  for_each_row(m, d, parallel, [&](std::size_t row) {
    const std::size_t first = row * d;
    moments[row] = moments_of(layer, x.data() + first);
    const auto [mean, rstd] = moments[row];
    double sum = 0, product = 0;
    for (std::size_t i = 0; i < d; ++i) {
      const double g = w[i] * dy[first + i];
      sum += g;
      product += g * (x[first + i] - mean) * rstd;
    }
    sum /= static_cast<double>(layer.d);
    product /= static_cast<double>(layer.d);
    for (std::size_t i = 0; i < d; ++i) {
      const double normalised = (x[first + i] - mean) * rstd;
      dx[first + i] = rstd * (w[i] * dy[first + i] - sum - normalised * product);
      // Two features: what the subtraction leaves of them is known without it.
      if (d == 2) dx[first + i] = rstd * (w[i] * dy[first + i] - sum) * layer.eps * rstd * rstd;
      if (layer.adds) dx[first + i] += tensors.at("dsum")[first + i];
    }
  });
  std::vector<double> dw(d), db(d);
  constexpr std::size_t columns = 64;  // of a task: every row's part of it is a few cache lines
  parallel.run(static_cast<int>((d + columns - 1) / columns), parallel.max_threads(),
               [&](int task) {
                 const std::size_t begin = static_cast<std::size_t>(task) * columns;
                 const std::size_t end = std::min(d, begin + columns);
                 for (std::size_t row = 0; row < m; ++row)
                   for (std::size_t i = begin; i < end; ++i) {
                     const auto [mean, rstd] = moments[row];
                     dw[i] += dy[row * d + i] * (x[row * d + i] - mean) * rstd;
                     db[i] += dy[row * d + i];
                   }
               });
  tensors["dx"] = std::move(dx);
  tensors["dw"] = std::move(dw);
  tensors["db"] = std::move(db);
}

}  // namespace

void reference(const Layer& layer, ReferenceTensors& tensors, Parallel& parallel) {
  if (layer.backward)
    backward(layer, tensors, parallel);
  else
    forward(layer, tensors, parallel);
}

}  // namespace fftune::layernorm
