#include "kernels/gemm/reference_product.hpp"

#include <algorithm>

namespace fftune {

void reference_product(Parallel& parallel, std::int64_t m, std::int64_t n, std::int64_t k,
                       const DoubleMatrixView& a, const DoubleMatrixView& b, double beta,
                       double* c) {
  constexpr std::int64_t least_rows = 16;  // of a task, so that packing b costs little beside it
  const std::int64_t threads = parallel.max_threads();
  const std::int64_t rows = std::max(least_rows, (m + 2 * threads - 1) / (2 * threads));
  const BlasThreads alone(1);
  parallel.run(static_cast<int>((m + rows - 1) / rows), static_cast<int>(threads), [&](int task) {
    const std::int64_t first = task * rows;
    const std::int64_t at = a.transposed ? first : first * a.stride;
    dgemm(std::min(rows, m - first), n, k, {a.data + at, a.stride, a.transposed}, b, beta,
          c + first * n, n);
  });
}

}  // namespace fftune
