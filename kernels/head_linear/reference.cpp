#include <vector>

#include "device/parallel.hpp"
#include "kernels/head_linear/head_linear.hpp"

namespace fftune::head_linear {

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const Layer layer = layer_of(problem);
  const std::vector<double>&x = tensors.at("x"), &w = tensors.at("w");
  auto y =
      large_vector<double>(static_cast<std::size_t>(layer.m * layer.heads * layer.n), parallel);
  const auto tasks = static_cast<std::size_t>(layer.m * layer.heads);
  for_each_row(tasks, static_cast<std::size_t>(layer.n * layer.k), parallel, [&](std::size_t row) {
    const auto at = static_cast<std::int64_t>(row);
    const double* const from = x.data() + at * layer.x_head;
    const double* const weight =
        w.data() + ((at % layer.heads) * layer.w_rows + layer.w_skip) * layer.columns();
    for (std::int64_t j = 0; j < layer.n; ++j) {
      double sum = 0;
      for (std::int64_t i = 0; i < layer.k; ++i)
        sum += from[i] * (layer.inputs_as_rows ? weight[i * layer.n + j] : weight[j * layer.k + i]);
      y[row * static_cast<std::size_t>(layer.n) + static_cast<std::size_t>(j)] = sum;
    }
  });
  tensors["y"] = std::move(y);
}

}  // namespace fftune::head_linear
