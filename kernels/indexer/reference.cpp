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

/// The keys of a sequence, zeros where their page is not in memory.
struct Keys {
  std::vector<double> rows, scales;

  Keys(const Layer& layer, std::int64_t sequence, std::int64_t length,
       const ReferenceTensors& tensors)
      : rows(at(length * layer.dim)), scales(at(length)) {
    const double* const pages = layer.page > 0 ? tensors.at("pages").data() : nullptr;
    for (std::int64_t j = 0; j < length; ++j) {
      const std::int64_t block = block_of(layer, pages, sequence, j),
                         row = layer.page > 0 ? j % layer.page : j;
      if (block < 0) continue;
      std::copy_n(tensors.at("k").data() + block * layer.k_block + row * layer.dim, layer.dim,
                  rows.begin() + j * layer.dim);
      if (layer.e4m3) scales[at(j)] = tensors.at("k_scale")[at(block * layer.scale_block + row)];
    }
  }
};

/// Scores of the queries of a sequence; -infinity of keys that a query does not see.
void score_sequence(const Layer& layer, std::int64_t sequence, std::int64_t length, const double* q,
                    const double* weights, const Keys& keys, double* scores) {
  std::vector<double> products(at(layer.heads * layer.kv));
  for (std::int64_t i = 0; i < layer.s; ++i) {
    const std::int64_t row = sequence * layer.s + i, visible = layer.visible(i, length);
    double* const own = scores + row * layer.kv;
    std::fill_n(own, layer.kv, -infinity);
    if (visible == 0) continue;
    dgemm(layer.heads, visible, layer.dim, {q + row * layer.heads * layer.dim, layer.dim},
          {keys.rows.data(), layer.dim}, 0, products.data(), visible);
    std::fill_n(own, visible, 0.0);
    for (std::int64_t h = 0; h < layer.heads; ++h) {
      const double weight = weights[row * layer.heads + h];
      for (std::int64_t j = 0; j < visible; ++j) {
        const double product = products[at(h * visible + j)];
        own[j] += weight * (product <= 0 ? 0 : product);
      }
    }
    for (std::int64_t j = 0; layer.e4m3 && j < visible; ++j) own[j] *= keys.scales[at(j)];
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
  const double *const q = tensors.at("q").data(), *const weights = tensors.at("weights").data();
  for_each_row(at(layer.b), at(layer.s * layer.kv), parallel, [&](std::size_t sequence) {
    const auto index = static_cast<std::int64_t>(sequence);
    const std::int64_t length = length_in(layer, tensors, index);
    score_sequence(layer, index, length, q, weights, Keys(layer, index, length, tensors),
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
