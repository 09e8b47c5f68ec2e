#include <algorithm>
#include <cmath>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/mla_rope/mla_rope.hpp"

namespace fftune::mla_rope {
namespace {

/// A token's features [rope] as they are stored.
void rotate(const double* from, double* to, const Layer& layer, double scale,
            const std::vector<double>& angles) {
  if (!layer.rotates()) std::copy_n(from, layer.rope, to);
  const std::int64_t half = layer.rope / 2;
  const bool by_halves = layer.rotation == Rotation::halves;
  for (std::int64_t pair = 0; pair < static_cast<std::int64_t>(angles.size()); ++pair) {
    const double angle = angles[static_cast<std::size_t>(pair)];
    const double x = from[by_halves ? pair : 2 * pair];
    const double y = from[by_halves ? pair + half : 2 * pair + 1];
    const bool ends_in_halves = by_halves || layer.to_halves;
    to[ends_in_halves ? pair : 2 * pair] = scale * (x * std::cos(angle) - y * std::sin(angle));
    to[ends_in_halves ? pair + half : 2 * pair + 1] =
        scale * (y * std::cos(angle) + x * std::sin(angle));
  }
}

}  // namespace

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const Layer layer = layer_of(problem);
  const Turns turns = turns_of(problem);
  const double *const q = tensors.at("q").data(), *const kv = tensors.at("kv").data(),
                      *const norm = tensors.at("norm").data();
  const auto& slots = tensors.at("slots");
  auto q_rope =
      large_vector<double>(static_cast<std::size_t>(layer.m * layer.heads * layer.rope), parallel);
  double* const cache = tensors.at("cache").data();
  const auto width = static_cast<std::size_t>(layer.heads * layer.rope + layer.width());
  for_each_row(static_cast<std::size_t>(layer.m), width, parallel, [&](std::size_t row) {
    const auto token = static_cast<std::int64_t>(row);
    const std::vector<double> angles = layer.rotates()
                                           ? rope::angles_of(layer.rotated(), turns, tensors, row)
                                           : std::vector<double>();
    for (std::int64_t head = token * layer.heads; head < (token + 1) * layer.heads; ++head)
      rotate(q + head * (layer.nope + layer.rope) + layer.nope, q_rope.data() + head * layer.rope,
             layer, double{turns.scale}, angles);
    const auto slot = static_cast<std::int64_t>(slots[row]);
    if (slot < 0 || slot >= layer.cache_rows) return;
    const double* const from = kv + token * layer.width();
    double* const to = cache + slot * layer.width();
    double squares = 0;
    for (std::int64_t i = 0; i < layer.rank; ++i) squares += from[i] * from[i];
    const double deviation = std::sqrt(squares / static_cast<double>(layer.rank) + layer.epsilon);
    for (std::int64_t i = 0; i < layer.rank; ++i) to[i] = from[i] / deviation * norm[i];
    rotate(from + layer.rank, to + layer.rank, layer, double{turns.scale}, angles);
  });
  tensors["q_rope"] = std::move(q_rope);
}

}  // namespace fftune::mla_rope
