#include <cmath>
#include <cstddef>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/gated_rmsnorm/gated_rmsnorm.hpp"

namespace fftune::gated_rmsnorm {
namespace {

struct Gate {
  double value = 0, slope = 0;
};

Gate gate_of(const Layer& layer, double z) {
  const double s = 1 / (1 + std::exp(-z));
  if (layer.sigmoid) return {s, s * (1 - s)};
  return {z * s, s + z * s * (1 - s)};
}

}  // namespace

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const Layer layer = layer_of(problem);
  const auto d = static_cast<std::size_t>(layer.d), groups = static_cast<std::size_t>(layer.groups);
  const auto width = static_cast<std::size_t>(layer.width());
  const auto z_row = static_cast<std::size_t>(layer.z_row);
  const auto &x = tensors.at("x"), &z = tensors.at("z");
  const std::vector<double> none;
  const auto& w = layer.normed ? tensors.at("w") : none;
  const std::size_t m = x.size() / width;
  const auto rounded = [&](double value, bool also) {
    return layer.rounds && also ? round_to(layer.dtype, value) : value;
  };
  std::vector<double> out = large_vector<double>(m * width, parallel), dz, terms;
  if (layer.backward) {
    dz = large_vector<double>(m * width, parallel);
    terms = large_vector<double>(m * width, parallel);  // of dw
  }
  for_each_row(m * groups, d, parallel, [&](std::size_t row) {
    const std::size_t token = row / groups, group = row % groups, first = row * d;
    std::vector<Gate> gates(d);
    std::vector<double> input(d);
    double squares = 0;
    for (std::size_t i = 0; i < d; ++i) {
      gates[i] = gate_of(layer, z[token * z_row + (layer.row_gate ? group : group * d + i)]);
      input[i] = x[first + i] * (layer.before ? gates[i].value : 1);
      squares += input[i] * input[i];
    }
    if (!layer.normed) {
      for (std::size_t i = 0; i < d; ++i) out[first + i] = input[i] * gates[i].value;
      return;
    }
    const double r = 1 / std::sqrt(squares / static_cast<double>(d) + double{layer.eps});
    const double* const weights = w.data() + (layer.one_w ? 0 : group * d);
    if (!layer.backward) {
      for (std::size_t i = 0; i < d; ++i) {
        const double normed = rounded(rounded(input[i] * r, true) * weights[i],
                                      !layer.before && layer.weight_dtype == layer.dtype);
        out[first + i] = layer.before ? normed : normed * gates[i].value;
      }
      return;
    }
    const double* const dy = tensors.at("dy").data() + first;
    std::vector<double> slopes(d);  // of the norm's result
    double product = 0;
    for (std::size_t i = 0; i < d; ++i) {
      slopes[i] = dy[i] * (layer.before ? 1 : gates[i].value);
      terms[first + i] = slopes[i] * input[i] * r;
      product += slopes[i] * weights[i] * input[i] * r;
    }
    product /= static_cast<double>(d);
    for (std::size_t i = 0; i < d; ++i) {
      const double normed = input[i] * r;
      double gradient = r * (slopes[i] * weights[i] - normed * product);
      if (d == 1) gradient = r * slopes[i] * weights[i] * (double{layer.eps} * r * r);
      if (layer.before) {
        dz[first + i] = gradient * x[first + i] * gates[i].slope;
        out[first + i] = gradient * gates[i].value;
      } else {
        dz[first + i] = dy[i] * normed * weights[i] * gates[i].slope;
        out[first + i] = gradient;
      }
    }
  });
  if (!layer.backward) {
    tensors["y"] = std::move(out);
    return;
  }
  std::vector<double> dw(width);
  for (std::size_t token = 0; token < m; ++token)
    for (std::size_t i = 0; i < width; ++i) dw[i] += terms[token * width + i];
  tensors["dx"] = std::move(out);
  tensors["dz"] = std::move(dz);
  tensors["dw"] = std::move(dw);
}

}  // namespace fftune::gated_rmsnorm
