#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/gemm/reference_product.hpp"
#include "kernels/qkv/qkv.hpp"

namespace fftune::qkv {
namespace {

/// Normalises heads of v, which have no weights.
void normalise_values(double* row, std::size_t width, const Layer& layer) {
  const auto dim = static_cast<std::size_t>(layer.dim);
  for (std::size_t first = 0; first < width; first += dim) {
    double squares = 0;
    for (std::size_t i = first; i < first + dim; ++i) squares += row[i] * row[i];
    const double deviation = std::sqrt(squares / static_cast<double>(dim) + layer.epsilon);
    for (std::size_t i = first; i < first + dim; ++i) row[i] /= deviation;
  }
}

/// Normalises heads that lie next to each other: one of them, or all of q or k together.
void normalise(double* features, std::size_t count, const Layer& layer, const std::string& part,
               const ReferenceTensors& tensors) {
  const std::vector<double>& weights = tensors.at(part + "_norm");
  const bool centred = layer.norm == HeadNorm::centred;
  double mean = 0, squares = 0;
  for (std::size_t i = 0; centred && i < count; ++i)
    mean += features[i] / static_cast<double>(count);
  for (std::size_t i = 0; i < count; ++i) squares += (features[i] - mean) * (features[i] - mean);
  const double deviation = std::sqrt(squares / static_cast<double>(count) + layer.epsilon);
  for (std::size_t i = 0; i < count; ++i) {
    features[i] = (features[i] - mean) * (layer.norm_offset + weights[i]) / deviation;
    if (centred) features[i] += tensors.at(part + "_norm_bias")[i];
  }
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

/// Norms and rotation of one token's heads of q or k.
void finish(double* row, std::size_t width, const Layer& layer, const Turns& turns,
            const std::string& part, std::size_t token, const ReferenceTensors& tensors) {
  const auto dim = static_cast<std::size_t>(layer.dim);
  const std::size_t of_norm = layer.norm == HeadNorm::rows ? width : dim;
  const auto normalise_all = [&] {
    for (std::size_t first = 0; first < width; first += of_norm)
      normalise(row + first, of_norm, layer, part, tensors);
  };
  if (layer.normalises() && !layer.norm_last) normalise_all();
  if (layer.rotates()) {
    const std::vector<double> angles = rope::angles_of(layer.rotated(), turns, tensors, token);
    for (std::size_t head = 0; head < width; head += dim)
      rotate(row + head, layer, double{turns.scale}, angles);
  }
  if (layer.norm_last) normalise_all();
}

/// x times the weight of q, k or v, and its bias.
std::vector<double> product(const Layer& layer, const std::string& weight, std::int64_t first,
                            std::int64_t columns, const std::string& bias,
                            const ReferenceTensors& tensors, Parallel& parallel) {
  auto y = large_vector<double>(static_cast<std::size_t>(layer.m * columns), parallel);
  std::vector<double> x, w;  // numbers of quantised tensors
  if (layer.scaling != Scaling::none) {
    x = numbers_of(quantised_x(layer), tensors, parallel);
    w = numbers_of_weight(weight, layer.d, layer.scaling, tensors, parallel);
  }
  reference_product(
      parallel, layer.m, columns, layer.d, {x.empty() ? tensors.at("x").data() : x.data(), layer.d},
      {(w.empty() ? tensors.at(weight) : w).data() + first * layer.d, layer.d}, 0, y.data());
  if (!layer.bias) return y;
  const double* const own = tensors.at(bias).data() + first;
  const auto width = static_cast<std::size_t>(columns);
  for_each_row(static_cast<std::size_t>(layer.m), width, parallel, [&](std::size_t token) {
    for (std::size_t i = 0; i < width; ++i) y[token * width + i] += own[i];
  });
  return y;
}

/// A part of what the first of two stages wrote.
std::vector<double> raw_part(const Layer& layer, std::size_t part, const std::string& name,
                             const ReferenceTensors& tensors) {
  if (!layer.joined() && !(layer.gates && part == 0)) return tensors.at(name + "_raw");
  const std::int64_t heads = part == 0 ? layer.heads : layer.kv_heads;
  std::vector<double> y;
  for (std::int64_t token = 0; token < layer.m; ++token)
    for (std::int64_t head = 0; head < heads; ++head) {
      const auto& raw = tensors.at(layer.joined() ? "qkv_raw" : name + "_raw");
      const auto from = raw.begin() + layer.raw_place(part, token, head);
      y.insert(y.end(), from, from + layer.dim);
    }
  return y;
}

/// The gates in what the first of two stages wrote.
std::vector<double> raw_gates(const Layer& layer, const ReferenceTensors& tensors) {
  std::vector<double> gates;
  for (std::int64_t token = 0; token < layer.m; ++token)
    for (std::int64_t head = 0; head < layer.heads; ++head) {
      const auto from = tensors.at("q_raw").begin() + layer.raw_place(0, token, head) + layer.dim;
      gates.insert(gates.end(), from, from + layer.dim);
    }
  return gates;
}

}  // namespace

void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
               Parallel& parallel) {
  const Layer layer = layer_of(problem);
  const Turns turns = turns_of(problem);
  if (layer.format.packed && stage == 0) {
    reference_expand(packed_weights(problem), tensors, parallel);
    return;
  }
  if (quantises(problem) && stage == 0) {
    reference_quantise(quantised_x(problem), tensors, parallel);
    return;
  }
  if (layer.format.packed || quantises(problem)) --stage;
  const bool writes_raw = layer.in_two_stages() && stage == 0;
  if (writes_raw && layer.joined()) {
    tensors["qkv_raw"] = product(layer, layer.format.packed ? "w_dense" : "w", 0, layer.columns(),
                                 "bias", tensors, parallel);
    return;
  }
  if (layer.gates && !writes_raw) tensors["gates"] = raw_gates(layer, tensors);
  std::int64_t first = 0;  // row of the packed weight
  for (std::size_t at = 0; at < layer.parts(); ++at) {
    const std::string part(1, "qkv"[at]);
    const std::int64_t columns = at > 0       ? layer.kv_heads * layer.dim
                                 : writes_raw ? layer.q_columns()
                                              : layer.heads * layer.dim;
    auto y = stage == 1 ? raw_part(layer, at, part, tensors)
                        : product(layer, layer.packed ? "w" : "w_" + part, layer.packed ? first : 0,
                                  columns, layer.packed ? "bias" : "b_" + part, tensors, parallel);
    first += columns;
    if (writes_raw) {
      tensors[part + "_raw"] = std::move(y);
      continue;
    }
    const auto width = static_cast<std::size_t>(columns);
    if (part != "v")
      for_each_row(static_cast<std::size_t>(layer.m), width, parallel, [&](std::size_t token) {
        finish(y.data() + token * width, width, layer, turns, part, token, tensors);
      });
    else if (layer.v_norm)
      for_each_row(static_cast<std::size_t>(layer.m), width, parallel, [&](std::size_t token) {
        normalise_values(y.data() + token * width, width, layer);
      });
    if (layer.cache && part != "q") {
      auto& cache = tensors.at(part + "_cache");
      for (std::size_t token = 0; token < static_cast<std::size_t>(layer.m); ++token) {
        const auto slot = static_cast<std::int64_t>(tensors.at("slots")[token]);
        if (slot < 0 || slot >= layer.cache_rows) continue;
        for (std::int64_t head = 0; head < layer.kv_heads; ++head) {
          const double* const from =
              y.data() + token * width + static_cast<std::size_t>(head * layer.dim);
          double* const to = cache.data() + static_cast<std::size_t>(
                                                (slot * layer.kv_heads + head) * layer.cache_head);
          if (!layer.cache_format.e4m3) {
            std::copy_n(from, layer.dim, to);
            continue;
          }
          const auto place = static_cast<std::size_t>(layer.cache_format.scale_at(head));
          const double scale = tensors.at(part + "_scale")[place];
          std::transform(from, from + layer.dim, to,
                         [&](double value) { return round_to(DType::fp8, value / scale); });
        }
      }
    } else {
      tensors[part] = std::move(y);
    }
  }
}

}  // namespace fftune::qkv
