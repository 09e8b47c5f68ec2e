#include "kernels/gemm/reference_product.hpp"

#include <algorithm>
#include <cstddef>

#include "device/parallel.hpp"

namespace fftune {
namespace {

/// Whether the arithmetic intensity is high enough to compute the product on the device: 100
/// operations take 16 cores as long as the transfer of one byte.
bool may_move(std::int64_t m, std::int64_t n, std::int64_t k) {
  const auto share = [](std::int64_t size) { return 1 / static_cast<double>(size); };
  return 2 / (8 * (share(m) + share(n) + share(k))) >= 100;
}

bool moved(Parallel& parallel, std::int64_t m, std::int64_t n, std::int64_t k,
           const DoubleMatrixView& a, const DoubleMatrixView& b, double beta, double* c) {
  const bool dense = a.stride == (a.transposed ? m : k) && b.stride == (b.transposed ? n : k);
  if (!dense || !may_move(m, n, k)) return false;
  DoubleProduct product{m, n, k, a.data, b.data, a.transposed, b.transposed, c};
  if (beta == 0) return parallel.multiply(product);
  auto apart = large_vector<double>(static_cast<std::size_t>(m * n), parallel);
  product.c = apart.data();
  if (!parallel.multiply(product)) return false;
  for_each_row(apart.size() / static_cast<std::size_t>(n), static_cast<std::size_t>(n), parallel,
               [&](std::size_t row) {
                 const std::size_t first = row * static_cast<std::size_t>(n);
                 for (std::size_t i = first; i < first + static_cast<std::size_t>(n); ++i)
                   c[i] = beta * c[i] + apart[i];
               });
  return true;
}

}  // namespace

void reference_product(Parallel& parallel, std::int64_t m, std::int64_t n, std::int64_t k,
                       const DoubleMatrixView& a, const DoubleMatrixView& b, double beta,
                       double* c) {
  if (moved(parallel, m, n, k, a, b, beta, c)) return;
  const bool by_rows = m >= n;
  // Rows or columns of a task: enough for the cost of packing, and of starting a thread.
  constexpr std::int64_t least_products = 1 << 20;
  const std::int64_t products = std::max<std::int64_t>(1, by_rows ? n * k : m * k);
  const std::int64_t least = std::max<std::int64_t>(16, least_products / products);
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
