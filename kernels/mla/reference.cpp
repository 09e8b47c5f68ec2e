// The definition of mla in float64: a task has some rows of a sequence, and two products.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/blas.hpp"
#include "device/parallel.hpp"
#include "kernels/mla/mla.hpp"

namespace fftune::mla {
namespace {

constexpr std::int64_t most_rows = 128;  // of a task
constexpr double infinity = std::numeric_limits<double>::infinity();
using Values = std::vector<double>;

std::size_t at(std::int64_t place) {
  return static_cast<std::size_t>(place);
}

/// Weights of a row from its products; returns their log-sum-exp.
double weigh(double* row, std::int64_t count, std::int64_t visible, double scale) {
  double most = -infinity, sum = 0;
  for (std::int64_t j = 0; j < visible; ++j) {
    row[j] *= scale;
    // NaN is the largest.
    if (!(row[j] <= most)) most = row[j];
  }
  for (std::int64_t j = 0; j < visible; ++j) {
    row[j] = row[j] == -infinity ? 0 : std::exp(row[j] - most);
    sum += row[j];
  }
  std::fill(row + visible, row + count, 0.0);
  if (sum == 0) return -infinity;
  for (std::int64_t j = 0; j < visible; ++j) row[j] /= sum;
  return most + std::log(sum);
}

}  // namespace

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const Layer layer = layer_of(problem);
  const std::int64_t width = layer.width(), rows = layer.rows();
  const double* const lengths = layer.lengths ? tensors.at("lengths").data() : nullptr;
  const double* const pages = layer.page > 0 ? tensors.at("pages").data() : nullptr;
  const double* const chosen = layer.top > 0 ? tensors.at("chosen").data() : nullptr;
  const double* const cache = tensors.at("cache").data();
  const double* const q_latent = tensors.at("q_latent").data();
  const double* const q_rope = layer.rope > 0 ? tensors.at("q_rope").data() : nullptr;
  auto out = large_vector<double>(at(layer.b * rows * layer.rank), parallel);
  Values lse(layer.lse ? at(layer.b * rows) : 0);
  // With lists a task has rows of one query.
  const std::int64_t alike = layer.top > 0 ? layer.heads : rows;
  const std::int64_t blocks = (alike + most_rows - 1) / most_rows, parts = rows / alike * blocks;
  const BlasThreads alone(1);
  parallel.run(static_cast<int>(layer.b * parts), parallel.max_threads(), [&](int task) {
    const std::int64_t sequence = task / parts, part = task % parts;
    const std::int64_t begin = part % blocks * most_rows, first = part / blocks * alike + begin;
    const std::int64_t count = std::min(most_rows, alike - begin);
    const std::int64_t length = length_of(layer, lengths, sequence);
    // With those that no row of the block sees: zero times their NaN is NaN, as in kernels, whose
    // blocks are others.
    std::vector<std::int64_t> seen;
    for (std::int64_t j = 0; j < (layer.top > 0 ? layer.top : length); ++j) {
      const std::int64_t key =
          layer.top > 0 ? chosen_key(layer, chosen, sequence, first / layer.heads, j, length) : j;
      if (key >= 0) seen.push_back(key);
    }
    const std::int64_t keys = std::ssize(seen);
    double* const own_out = out.data() + (sequence * rows + first) * layer.rank;
    if (keys == 0) {
      std::fill_n(own_out, count * layer.rank, 0.0);
      for (std::int64_t r = first; layer.lse && r < first + count; ++r)
        lse[at((sequence * layer.heads + r % layer.heads) * layer.s + r / layer.heads)] = -infinity;
      return;
    }
    Values q, k(at(keys * width)), scores(at(count * keys));
    for (std::int64_t r = sequence * rows + first; r < sequence * rows + first + count; ++r) {
      q.insert(q.end(), q_latent + r * layer.rank, q_latent + (r + 1) * layer.rank);
      if (layer.rope > 0) q.insert(q.end(), q_rope + r * layer.rope, q_rope + (r + 1) * layer.rope);
    }
    for (std::int64_t j = 0; j < keys; ++j)
      if (const std::int64_t place = place_of(layer, pages, sequence, seen[at(j)]); place >= 0)
        std::copy_n(cache + place, width, k.begin() + j * width);
    dgemm(count, keys, width, {q.data(), width}, {k.data(), width}, 0, scores.data(), keys);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t r = first + i;
      const double own =
          weigh(scores.data() + i * keys, keys, layer.top > 0 ? keys : layer.visible(r, length),
                double{layer.scale});
      if (layer.lse)
        lse[at((sequence * layer.heads + r % layer.heads) * layer.s + r / layer.heads)] = own;
    }
    dgemm(count, layer.rank, keys, {scores.data(), keys}, {k.data(), width, true}, 0, own_out,
          layer.rank);
  });
  tensors["out"] = std::move(out);
  if (layer.lse) tensors["lse"] = std::move(lse);
}

}  // namespace fftune::mla
