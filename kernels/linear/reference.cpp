#include <algorithm>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/gemm/reference_product.hpp"
#include "kernels/linear/linear.hpp"

namespace fftune::linear {

void reference(const Problem& problem, const std::string& stage, ReferenceTensors& tensors,
               Parallel& parallel) {
  const std::int64_t m = problem.size("m"), k = problem.size("k"), n = problem.size("n");
  const auto width = static_cast<std::size_t>(n);
  const Form form = form_of(problem);
  const auto data = [&](const char* name) -> const double* { return tensors.at(name).data(); };
  const auto start = [&](bool adds, const char* name, std::int64_t elements) {
    return adds ? large_copy(tensors.at(name), parallel)
                : large_vector<double>(static_cast<std::size_t>(elements), parallel);
  };
  if (stage == stage_expand) {
    reference_expand(packed_weights(problem), tensors, parallel);
  } else if (stage == stage_quantise) {
    reference_quantise(quantised_x(problem), tensors, parallel);
  } else if (stage == stage_product) {
    auto y = large_vector<double>(static_cast<std::size_t>(m * n), parallel);
    std::vector<double> x, w;  // numbers of quantised tensors
    if (quantises(problem)) {
      x = numbers_of(quantised_x(problem), tensors, parallel);
      w = numbers_of_weight("w", k, quantised_scaling(problem), tensors, parallel);
    }
    reference_product(parallel, m, n, k, {x.empty() ? data("x") : x.data(), k},
                      {!w.empty()                      ? w.data()
                       : packed_format(problem).packed ? data("w_dense")
                                                       : data("w"),
                       k},
                      0, y.data());
    const double* const bias = form.bias ? data("bias") : nullptr;
    const double* const scale = form.y_scale ? data("y_scale") : nullptr;
    const double* const residual = form.residual ? data("residual") : nullptr;
    for_each_row(static_cast<std::size_t>(m), width, parallel, [&](std::size_t row) {
      for (std::size_t i = 0; i < width; ++i) {
        double& value = y[row * width + i];
        value = (value + (bias ? bias[i] : 0)) * (scale ? scale[i] : 1) +
                (residual ? residual[row * width + i] : 0);
      }
    });
    tensors["y"] = std::move(y);
  } else if (stage == stage_d_x) {
    auto dx = start(false, "", m * k);
    reference_product(parallel, m, k, n, {data("dy"), n}, {data("w"), k, true}, 0, dx.data());
    tensors["dx"] = std::move(dx);
  } else if (stage == stage_d_w) {
    auto dw = start(form.accumulates, "dw_before", n * k);
    reference_product(parallel, n, k, m, {data("dy"), n, true}, {data("x"), k, true},
                      form.accumulates, dw.data());
    tensors["dw"] = std::move(dw);
  } else {
    auto dbias = start(form.accumulates, "dbias_before", n);
    constexpr std::size_t columns = 64;  // of a task: of every row a few cache lines
    const double* const dy = data("dy");
    parallel.run(static_cast<int>((width + columns - 1) / columns), parallel.max_threads(),
                 [&](int task) {
                   const std::size_t first = static_cast<std::size_t>(task) * columns;
                   for (std::size_t row = 0; row < static_cast<std::size_t>(m); ++row)
                     for (std::size_t i = first; i < std::min(width, first + columns); ++i)
                       dbias[i] += dy[row * width + i];
                 });
    tensors["dbias"] = std::move(dbias);
  }
}

}  // namespace fftune::linear
