#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/norm/norm.hpp"

namespace fftune::norm {
namespace {

double factor(const Layer& layer, double weight) {
  return layer.convention == Convention::gemma ? 1 + weight : weight;
}

/// x̂ as it is multiplied.
double normalised(const Layer& layer, double value) {
  const bool rounds = layer.convention == Convention::llama && !layer.quantises();
  return rounds ? round_to(layer.dtype, value) : value;
}

struct Moments {
  double mean = 0;  // taken away: 0 of rmsnorm
  double rstd = 0;
};

Moments moments_of(const Layer& layer, const double* row) {
  double sum = 0, squares = 0;
  if (layer.centres)
    for (std::int64_t i = 0; i < layer.d; ++i) sum += row[i];
  const double mean = sum / static_cast<double>(layer.d);
  for (std::int64_t i = 0; i < layer.d; ++i) squares += (row[i] - mean) * (row[i] - mean);
  return {mean, 1 / std::sqrt(squares / static_cast<double>(layer.d) + double{layer.eps})};
}

/// Divides a row by its scale, which it returns. The scale of a row with a NaN is NaN; an integer
/// holds none, and is 0 there.
double quantise(const Layer& layer, double* row) {
  const double largest =
      largest_magnitude(std::span<const double>(row, static_cast<std::size_t>(layer.d)));
  const double limit = layer.out_dtype == DType::fp8 ? 448 : 127;
  const double scale = largest <= std::ldexp(1.0, -100) ? 1 : largest / limit;
  for (std::int64_t i = 0; i < layer.d; ++i) {
    row[i] /= scale;
    if (is_integer(layer.out_dtype) && std::isnan(row[i])) row[i] = 0;
  }
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
    const Moments of = moments_of(layer, x);
    rstd[row] = of.rstd;
    double* const out = y.data() + row * d;
    for (std::size_t i = 0; i < d; ++i)
      out[i] = normalised(layer, (x[i] - of.mean) * of.rstd) * factor(layer, w[i]);
    if (layer.centres)
      for (std::size_t i = 0; i < d; ++i) out[i] += tensors.at("b")[i];
    if (layer.adds_after)
      for (std::size_t i = 0; i < d; ++i) out[i] += tensors.at("residual")[row * d + i];
    if (layer.quantises()) scale[row] = quantise(layer, out);
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
  std::vector<Moments> moments(m);
  auto dx = large_vector<double>(x.size(), parallel);
  for_each_row(m, d, parallel, [&](std::size_t row) {
    const std::size_t first = row * d;
    Moments& of = moments[row];
    if (layer.saves)
      of.rstd = tensors.at("rstd")[row];
    else
      of = moments_of(layer, x.data() + first);
    const auto [mean, rstd] = of;
    double sum = 0, product = 0;
    for (std::size_t i = 0; i < d; ++i) {
      const double g = factor(layer, w[i]) * dy[first + i];
      if (layer.centres) sum += g;
      product += g * (x[first + i] - mean) * rstd;
    }
    sum /= static_cast<double>(layer.d);
    product /= static_cast<double>(layer.d);
    for (std::size_t i = 0; i < d; ++i) {
      const double g = factor(layer, w[i]) * dy[first + i] - sum;
      dx[first + i] = rstd * (g - (x[first + i] - mean) * rstd * product);
      // Two features: what the subtraction leaves of them is known without it.
      if (layer.centres && d == 2) dx[first + i] = rstd * g * layer.eps * rstd * rstd;
      if (layer.adds) dx[first + i] += tensors.at("dsum")[first + i];
    }
  });
  std::vector<double> dw(d), db(layer.centres ? d : 0);
  constexpr std::size_t columns = 64;  // of a task: every row's part of it is a few cache lines
  parallel.run(static_cast<int>((d + columns - 1) / columns), parallel.max_threads(),
               [&](int task) {
                 const std::size_t begin = static_cast<std::size_t>(task) * columns;
                 const std::size_t end = std::min(d, begin + columns);
                 for (std::size_t row = 0; row < m; ++row) {
                   const auto [mean, rstd] = moments[row];
                   for (std::size_t i = begin; i < end; ++i) {
                     dw[i] += dy[row * d + i] * (x[row * d + i] - mean) * rstd;
                     if (layer.centres) db[i] += dy[row * d + i];
                   }
                 }
               });
  tensors["dx"] = std::move(dx);
  tensors["dw"] = std::move(dw);
  if (layer.centres) tensors["db"] = std::move(db);
}

}  // namespace

void reference(const Layer& layer, ReferenceTensors& tensors, Parallel& parallel) {
  if (layer.backward)
    backward(layer, tensors, parallel);
  else
    forward(layer, tensors, parallel);
}

}  // namespace fftune::norm
