#include "kernels/gemm/reference_product.hpp"

#include <algorithm>

namespace fftune {

void reference_product(Parallel& parallel, std::int64_t m, std::int64_t n, std::int64_t k,
                       const DoubleMatrixView& a, const DoubleMatrixView& b, double beta,
                       double* c) {
  constexpr std::int64_t least = 16;  // rows or columns of a task, for what packing costs beside it
  const bool by_rows = m >= n;
  const std::int64_t threads = parallel.max_threads(), all = by_rows ? m : n;
  const std::int64_t share = std::max(least, (all + 2 * threads - 1) / (2 * threads));
  const auto at = [](const DoubleMatrixView& matrix, std::int64_t row) {
    return DoubleMatrixView{matrix.data + (matrix.transposed ? row : row * matrix.stride),
                            matrix.stride, matrix.transposed};
  };
  const BlasThreads alone(1);
  parallel.run(static_cast<int>((all + share - 1) / share), static_cast<int>(threads),
               [&](int task) {
                 const std::int64_t first = task * share, count = std::min(share, all - first);
                 if (by_rows) {
                   dgemm(count, n, k, at(a, first), b, beta, c + first * n, n);
                 } else {
                   dgemm(m, count, k, a, at(b, first), beta, c + first, n);
                 }
               });
}

}  // namespace fftune
