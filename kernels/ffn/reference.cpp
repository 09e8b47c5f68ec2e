#include "kernels/ffn/reference.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/common/activation.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {
namespace {

/// The sum of a[i] b[i], in eight partial sums, which a compiler may keep in vectors.
double dot(const double* a, const double* b, std::size_t count) {
  double partial[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (std::size_t lane = 0; lane < 8; ++lane) partial[lane] += a[i + lane] * b[i + lane];
  double sum = 0;
  for (; i < count; ++i) sum += a[i] * b[i];
  for (const double part : partial) sum += part;
  return sum;
}

/// Calls body(row) for every weight row, in parallel. Rows of x stay in the cache while each
/// weight row is read from memory once.
template <typename Body>
void for_each_row(std::size_t rows, Parallel& parallel, const Body& body) {
  constexpr std::size_t block = 16;
  const auto blocks = static_cast<int>((rows + block - 1) / block);
  parallel.run(blocks, parallel.max_threads(), [&](int task) {
    const auto first = static_cast<std::size_t>(task) * block;
    for (std::size_t row = first; row < std::min(rows, first + block); ++row) body(row);
  });
}

}  // namespace

void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
               Parallel& parallel) {
  const Shape shape = shape_of(problem);
  const auto m = static_cast<std::size_t>(shape.m);
  const auto d = static_cast<std::size_t>(shape.d);
  const auto h = static_cast<std::size_t>(shape.h);
  if (stage == 0) {
    const auto activation = parse_activation(problem.option("act"));
    const double* x = tensors.at("x").data();
    const double* w_gate = tensors.at("w_gate").data();
    const double* w_up = tensors.at("w_up").data();
    const bool saves = form_of(problem).saves;
    std::vector<double> hidden(m * h), gates(saves ? m * h : 0), ups(gates.size());
    for_each_row(h, parallel, [&](std::size_t j) {
      for (std::size_t i = 0; i < m; ++i) {
        const double gate = dot(x + i * d, w_gate + j * d, d);
        const double up = dot(x + i * d, w_up + j * d, d);
        hidden[i * h + j] = activate(activation, gate) * up;
        if (!saves) continue;
        gates[i * h + j] = gate;
        ups[i * h + j] = up;
      }
    });
    tensors["hidden"] = std::move(hidden);
    if (!saves) return;
    tensors["gate"] = std::move(gates);
    tensors["up"] = std::move(ups);
  } else {
    const double* hidden = tensors.at("hidden").data();
    const double* w_down = tensors.at("w_down").data();
    const Form form = form_of(problem);
    const double* bias = form.bias ? tensors.at("b_down").data() : nullptr;
    std::vector<double> y = form.residual ? tensors.at("residual") : std::vector<double>(m * d);
    for_each_row(d, parallel, [&](std::size_t j) {
      for (std::size_t i = 0; i < m; ++i)
        y[i * d + j] += dot(hidden + i * h, w_down + j * h, h) + (bias ? bias[j] : 0);
    });
    tensors["y"] = std::move(y);
  }
}

}  // namespace fftune::ffn
