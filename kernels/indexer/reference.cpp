// The definition of indexer in float64.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "cpu/blas.hpp"
#include "device/parallel.hpp"
#include "kernels/indexer/indexer.hpp"

namespace fftune::indexer {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

std::size_t at(std::int64_t place) {
  return static_cast<std::size_t>(place);
}

/// NaN is above every number.
bool is_better(double value, double than) {
  return value > than || (std::isnan(value) && !std::isnan(than));
}

/// Scores of the queries of a sequence; -infinity of keys that a query does not see.
void score_sequence(const Layer& layer, std::int64_t sequence, std::int64_t length, const double* q,
                    const double* weights, const double* k, const double* k_scale, double* scores) {
  std::vector<double> products(at(layer.heads * layer.kv));
  for (std::int64_t i = 0; i < layer.s; ++i) {
    const std::int64_t row = sequence * layer.s + i, visible = layer.visible(i, length);
    double* const own = scores + row * layer.kv;
    std::fill_n(own, layer.kv, -infinity);
    if (visible == 0) continue;
    dgemm(layer.heads, visible, layer.dim, {q + row * layer.heads * layer.dim, layer.dim},
          {k + sequence * layer.kv * layer.dim, layer.dim}, 0, products.data(), visible);
    std::fill_n(own, visible, 0.0);
    for (std::int64_t h = 0; h < layer.heads; ++h) {
      const double weight = weights[row * layer.heads + h];
      for (std::int64_t j = 0; j < visible; ++j) {
        const double product = products[at(h * visible + j)];
        own[j] += weight * (product <= 0 ? 0 : product);
      }
    }
    for (std::int64_t j = 0; layer.e4m3 && j < visible; ++j)
      own[j] *= k_scale[sequence * layer.kv + j];
  }
}

/// The places of the best `count` scores in ascending order; of equal ones the first.
std::vector<std::int64_t> best_places(std::span<const double> scores, std::int64_t count) {
  std::vector<std::int64_t> places(scores.size());
  std::iota(places.begin(), places.end(), std::int64_t{0});
  const auto end = places.begin() + std::min<std::int64_t>(count, std::ssize(places));
  std::nth_element(places.begin(), end, places.end(), [&](std::int64_t a, std::int64_t b) {
    return is_better(scores[at(a)], scores[at(b)]) ||
           (!is_better(scores[at(b)], scores[at(a)]) && a < b);
  });
  places.erase(end, places.end());
  std::sort(places.begin(), places.end());
  return places;
}

std::int64_t length_in(const Layer& layer, const ReferenceTensors& tensors, std::int64_t sequence) {
  return length_of(layer, layer.lengths ? tensors.at("lengths").data() : nullptr, sequence);
}

}  // namespace

void reference_scores(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const Layer layer = layer_of(problem);
  std::vector<double> scores(at(layer.b * layer.s * layer.kv));
  const double *const q = tensors.at("q").data(), *const k = tensors.at("k").data(),
                      *const weights = tensors.at("weights").data(),
                      *const k_scale = layer.e4m3 ? tensors.at("k_scale").data() : nullptr;
  for_each_row(at(layer.b), at(layer.s * layer.kv), parallel, [&](std::size_t sequence) {
    const auto index = static_cast<std::int64_t>(sequence);
    score_sequence(layer, index, length_in(layer, tensors, index), q, weights, k, k_scale,
                   scores.data());
  });
  tensors["scores"] = std::move(scores);
}

void reference_choice(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const Layer layer = layer_of(problem);
  const std::span<const double> scores(tensors.at("scores"));
  std::vector<double> ids(at(layer.b * layer.s * layer.top), -1.0);
  for_each_row(at(layer.b * layer.s), at(layer.kv), parallel, [&](std::size_t row) {
    const auto index = static_cast<std::int64_t>(row);
    const std::int64_t length = length_in(layer, tensors, index / layer.s),
                       visible = layer.visible(index % layer.s, length);
    const auto places = best_places(scores.subspan(row * at(layer.kv), at(visible)), layer.top);
    std::copy(places.begin(), places.end(), ids.begin() + index * layer.top);
  });
  tensors["ids"] = std::move(ids);
}

}  // namespace fftune::indexer
