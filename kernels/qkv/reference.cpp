#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "device/blocks.hpp"
#include "device/large_vector.hpp"
#include "kernels/gemm/reference_product.hpp"
#include "kernels/qkv/qkv.hpp"

namespace fftune::qkv {
namespace {

/// Multiplies a head by its norm's weights, over its root mean square.
void normalise(double* head, std::size_t dim, const std::vector<double>& weights, double offset,
               double epsilon) {
  double squares = 0;
  for (std::size_t i = 0; i < dim; ++i) squares += head[i] * head[i];
  const double deviation = std::sqrt(squares / static_cast<double>(dim) + epsilon);
  for (std::size_t i = 0; i < dim; ++i) head[i] *= (offset + weights[i]) / deviation;
}

/// The angle of every pair at a token's position.
std::vector<double> angles_of(const Layer& layer, const Turns& turns,
                              const ReferenceTensors& tensors, std::size_t token) {
  const auto rotary = static_cast<std::size_t>(layer.rotary);
  const auto position = static_cast<std::int64_t>(tensors.at("positions")[token]);
  std::vector<double> angles(rotary / 2);
  for (std::size_t pair = 0; pair < angles.size(); ++pair) {
    if (layer.table) {
      const auto row = std::clamp<std::int64_t>(position, 0, layer.positions - 1);
      const std::size_t first = layer.rotation == head_rotation::halves ? pair : 2 * pair;
      angles[pair] = tensors.at("angles")[static_cast<std::size_t>(row) * rotary + first];
    } else {
      angles[pair] = static_cast<float>(position) * turns.frequencies[pair];
    }
  }
  return angles;
}

void rotate(double* head, const Layer& layer, double scale, const std::vector<double>& angles) {
  const std::size_t pairs = angles.size();
  const bool halves = layer.rotation == head_rotation::halves;
  for (std::size_t pair = 0; pair < pairs; ++pair) {
    const std::size_t first = halves ? pair : 2 * pair, second = halves ? pair + pairs : first + 1;
    const double cosine = std::cos(angles[pair]) * scale, sine = std::sin(angles[pair]) * scale;
    const double x = head[first], y = head[second];
    head[first] = x * cosine - y * sine;
    head[second] = y * cosine + x * sine;
  }
}

}  // namespace

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const Layer layer = layer_of(problem);
  const Turns turns = turns_of(problem);
  const auto dim = static_cast<std::size_t>(layer.dim);
  std::int64_t first = 0;  // row of the packed weight
  for (const std::string part : {"q", "k", "v"}) {
    const std::int64_t heads = part == "q" ? layer.heads : layer.kv_heads;
    const std::int64_t columns = heads * layer.dim;
    const std::int64_t place = layer.packed ? first : 0;
    const auto of_part = [&](const std::string& packed, const std::string& own) -> const double* {
      return tensors.at(layer.packed ? packed : own + part).data();
    };
    auto y = large_vector<double>(static_cast<std::size_t>(layer.m * columns), parallel);
    reference_product(parallel, layer.m, columns, layer.d, {tensors.at("x").data(), layer.d},
                      {of_part("w", "w_") + place * layer.d, layer.d}, 0, y.data());
    const auto width = static_cast<std::size_t>(columns);
    for_each_row(static_cast<std::size_t>(layer.m), width, parallel, [&](std::size_t token) {
      double* const row = y.data() + token * width;
      if (layer.bias)
        for (std::size_t i = 0; i < width; ++i)
          row[i] += of_part("bias", "b_")[static_cast<std::size_t>(place) + i];
      if (part == "v") return;
      std::vector<double> angles;
      if (layer.rotates()) angles = angles_of(layer, turns, tensors, token);
      for (std::size_t head = 0; head < width; head += dim) {
        if (layer.norm)
          normalise(row + head, dim, tensors.at(part + "_norm"), layer.norm_offset, layer.epsilon);
        rotate(row + head, layer, double{turns.scale}, angles);
      }
    });
    if (layer.cache && part != "q") {
      auto& cache = tensors.at(part + "_cache");
      for (std::size_t token = 0; token < static_cast<std::size_t>(layer.m); ++token) {
        const auto slot = static_cast<std::int64_t>(tensors.at("slots")[token]);
        if (slot < 0 || slot >= layer.cache_rows) continue;
        std::copy_n(y.data() + token * width, width,
                    cache.data() + static_cast<std::size_t>(slot) * width);
      }
    } else {
      tensors[part] = std::move(y);
    }
    first += columns;
  }
}

}  // namespace fftune::qkv
