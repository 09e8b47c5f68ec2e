#include "verify/host_threads.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/dtype.hpp"
#include "device/parallel.hpp"
#include "verify/input_data.hpp"

namespace fftune {
namespace {

/// Sums of products, and the same of their magnitudes: what the former's rounding is relative to.
struct Sums {
  explicit Sums(std::int64_t count)
      : values(static_cast<std::size_t>(count)), sizes(static_cast<std::size_t>(count)) {}
  std::vector<double> values, sizes;
};

/// matrix [rows, columns] times x [columns].
Sums by_rows(const double* matrix, std::int64_t rows, std::int64_t columns,
             const std::vector<double>& x, Parallel& parallel) {
  Sums sums(rows);
  const auto width = static_cast<std::size_t>(columns);
  for_each_row(static_cast<std::size_t>(rows), width, parallel, [&](std::size_t row) {
    const double* const values = matrix + row * width;
    double sum = 0, size = 0;
    for (std::size_t i = 0; i < width; ++i) {
      sum += values[i] * x[i];
      size += std::abs(values[i] * x[i]);
    }
    sums.values[row] = sum;
    sums.sizes[row] = size;
  });
  return sums;
}

/// The transpose of matrix [rows, columns] times x [rows].
Sums by_columns(const double* matrix, std::int64_t rows, std::int64_t columns,
                const std::vector<double>& x, Parallel& parallel) {
  constexpr std::int64_t part = 256;  // columns of a task: 2 KiB of every row
  Sums sums(columns);
  parallel.run(static_cast<int>((columns + part - 1) / part), parallel.max_threads(),
               [&](int task) {
                 const std::int64_t first = task * part, last = std::min(columns, first + part);
                 for (std::int64_t row = 0; row < rows; ++row) {
                   const double by = x[static_cast<std::size_t>(row)];
                   for (std::int64_t column = first; column < last; ++column) {
                     const double term = matrix[row * columns + column] * by;
                     sums.values[static_cast<std::size_t>(column)] += term;
                     sums.sizes[static_cast<std::size_t>(column)] += std::abs(term);
                   }
                 }
               });
  return sums;
}

}  // namespace

bool is_product(const DoubleProduct& product, Parallel& parallel) {
  const auto [m, n, k, a, b, a_transposed, b_transposed, c] = product;
  // Random values of 24 bits, so that errors within a row do not cancel, and none near 0, which
  // would hide a column.
  std::vector<float> drawn(static_cast<std::size_t>(n));
  random_rows(0, "r", DType::f32, 1, 0, 1, n, drawn.data(), parallel);
  std::vector<double> r(drawn.begin(), drawn.end());
  for (double& value : r) value += std::copysign(1, value);
  const Sums b_r = b_transposed ? by_rows(b, k, n, r, parallel) : by_columns(b, n, k, r, parallel);
  const Sums a_b_r = a_transposed ? by_columns(a, k, m, b_r.values, parallel)
                                  : by_rows(a, m, k, b_r.values, parallel);
  const Sums c_r = by_rows(c, m, n, r, parallel);
  // Rounding in float64 is some 1e-16 of a sum's magnitudes, and grows slowly with its length.
  constexpr double bound = 1e-12;
  for (std::size_t row = 0; row < c_r.values.size(); ++row) {
    const double error = std::abs(c_r.values[row] - a_b_r.values[row]);
    // Negated so that NaN fails.
    if (!(error <= bound * (c_r.sizes[row] + a_b_r.sizes[row]))) return false;
  }
  return true;
}

bool ProvenProducts::multiply(const DoubleProduct& product) {
  if (!asks_ || !backend_->multiply(product)) return false;
  asks_ = is_product(product, threads_);
  return asks_;
}

void CancellableParallel::run(int tasks, int threads, const std::function<void(int)>& body) {
  inner_->run(tasks, threads, [&](int task) {
    check();
    body(task);
  });
}

bool CancellableParallel::multiply(const DoubleProduct& product) {
  check();
  return inner_->multiply(product);
}

}  // namespace fftune
