#include <vector>

#include "kernels/gemm/reference_product.hpp"
#include "kernels/linear/linear.hpp"

namespace fftune::linear {

void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
               Parallel& parallel) {
  const std::int64_t m = problem.size("m"), k = problem.size("k"), n = problem.size("n");
  const Form form = form_of(problem);
  const auto data = [&](const char* name) -> const double* { return tensors.at(name).data(); };
  const auto start = [&](bool adds, const char* name, std::int64_t elements) {
    return adds ? tensors.at(name) : std::vector<double>(static_cast<std::size_t>(elements));
  };
  if (!form.backward) {
    auto y = start(form.residual, "residual", m * n);
    reference_product(parallel, m, n, k, {data("x"), k}, {data("w"), k}, 1, y.data());
    for (std::int64_t i = 0; form.bias && i < m * n; ++i)
      y[static_cast<std::size_t>(i)] += data("bias")[i % n];
    tensors["y"] = std::move(y);
  } else if (stage == 0) {
    auto dx = start(false, "", m * k);
    reference_product(parallel, m, k, n, {data("dy"), n}, {data("w"), k, true}, 0, dx.data());
    tensors["dx"] = std::move(dx);
  } else if (stage == 1) {
    auto dw = start(form.accumulates, "dw_before", n * k);
    reference_product(parallel, n, k, m, {data("dy"), n, true}, {data("x"), k, true}, 1, dw.data());
    tensors["dw"] = std::move(dw);
  } else {
    auto dbias = start(form.accumulates, "dbias_before", n);
    for (std::int64_t i = 0; i < m * n; ++i)
      dbias[static_cast<std::size_t>(i % n)] += data("dy")[i];
    tensors["dbias"] = std::move(dbias);
  }
}

}  // namespace fftune::linear
