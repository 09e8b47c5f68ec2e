#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/rope/rope.hpp"

namespace fftune::rope {
namespace {

/// The token's place in its sequence, and the sequence's first position added where it has one.
std::int64_t position_of(const Layer& layer, const ReferenceTensors& tensors, std::int64_t token) {
  std::int64_t sequence = 0;
  std::int64_t position = 0;
  switch (layer.layout) {
    case Layout::sbhd:
      sequence = token % layer.b;
      position = token / layer.b;
      break;
    case Layout::bshd:
      sequence = token / layer.s;
      position = token % layer.s;
      break;
    case Layout::thd: {
      const auto& offsets = tensors.at("offsets");
      const auto at = [&](std::int64_t i) { return offsets[static_cast<std::size_t>(i)]; };
      while (sequence + 1 < layer.b && at(sequence + 1) <= static_cast<double>(token)) ++sequence;
      position = token - static_cast<std::int64_t>(at(sequence));
      break;
    }
  }
  if (layer.starts)
    position += static_cast<std::int64_t>(tensors.at("starts")[static_cast<std::size_t>(sequence)]);
  return position;
}

/// The angle of every rotated feature.
std::vector<double> angles_of(const Layer& layer, const Frequencies& frequencies,
                              const ReferenceTensors& tensors, std::int64_t position) {
  const auto rotary = static_cast<std::size_t>(layer.rotary);
  std::vector<double> angles(rotary);
  if (layer.table) {
    const auto row =
        static_cast<std::size_t>(std::clamp<std::int64_t>(position, 0, layer.positions - 1));
    const auto& table = tensors.at("angles");
    for (std::size_t i = 0; i < rotary; ++i) angles[i] = table[row * rotary + i];
    return angles;
  }
  for (std::size_t i = 0; i < rotary; ++i) {
    const std::size_t pair = layer.rotation == Rotation::halves ? i % (rotary / 2) : i / 2;
    angles[i] = static_cast<float>(position) * frequencies.values[pair];
  }
  return angles;
}

}  // namespace

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const Layer layer = layer_of(problem);
  const Frequencies frequencies = frequencies_of(problem);
  const auto rotary = static_cast<std::size_t>(layer.rotary);
  const auto dim = static_cast<std::size_t>(layer.dim);
  const bool halves = layer.rotation == Rotation::halves;
  const auto is_first = [&](std::size_t i) { return halves ? i < rotary / 2 : i % 2 == 0; };
  const auto partner_of = [&](std::size_t i) {
    const std::size_t distance = halves ? rotary / 2 : 1;
    return is_first(i) ? i + distance : i - distance;
  };
  const std::vector<Side> sides = sides_of(layer);
  std::vector<std::vector<double>> outs;
  for (const Side& side : sides)
    outs.push_back(large_vector<double>(static_cast<std::size_t>(layer.tokens() * side.heads) * dim,
                                        parallel));

  parallel.run(static_cast<int>(layer.tokens()), parallel.max_threads(), [&](int task) {
    const auto angles = angles_of(layer, frequencies, tensors, position_of(layer, tensors, task));
    std::vector<double> cosine(rotary), sine(rotary);
    for (std::size_t i = 0; i < rotary; ++i) {
      cosine[i] = std::cos(angles[i]) * double{frequencies.scale};
      sine[i] = std::sin(angles[i]) * double{frequencies.scale};
    }
    for (std::size_t side = 0; side < sides.size(); ++side)
      for (std::int64_t head = 0; head < sides[side].heads; ++head) {
        const double* const x =
            tensors.at(sides[side].in).data() + layer.place(sides[side].strides, task, head);
        double* const y =
            outs[side].data() + static_cast<std::size_t>(task * sides[side].heads + head) * dim;
        for (std::size_t i = 0; i < dim; ++i) {
          if (i >= rotary) {
            y[i] = x[i];
            continue;
          }
          const std::size_t partner = partner_of(i);
          const double sign = is_first(i) == layer.backward ? 1 : -1;
          y[i] = x[i] * cosine[i] + sign * x[partner] * sine[layer.backward ? partner : i];
        }
      }
  });
  for (std::size_t side = 0; side < sides.size(); ++side)
    tensors[sides[side].out] = std::move(outs[side]);
}

}  // namespace fftune::rope
