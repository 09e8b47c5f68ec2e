#include "kernels/gemm/problem.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace fftune {

double Groups::with_rows() const {
  if (expected_rows.empty()) return static_cast<double>(count);
  double sum = 0;
  for (const ExpectedRows& alike : expected_rows) sum += alike.groups * (1 - std::exp(-alike.rows));
  return std::max(sum, 1.0);
}

std::int64_t Groups::most_tiles(std::int64_t rows, std::int64_t height) const {
  return (rows + std::min(count, rows) * (height - 1)) / height;
}

double GemmProblem::flops() const {
  // Every token, or row, is of one group: groups add nothing.
  return 2.0 * b_operands() * k_pairs() * outputs() * static_cast<double>(m) *
         static_cast<double>(n) * static_cast<double>(k);
}

std::optional<std::string> misaligned_rows(const GemmProblem& gemm) {
  const auto elements = static_cast<std::int64_t>(16 / dtype_bytes(gemm.dtype));
  for (const std::int64_t row : {gemm.a_major == Major::mn ? gemm.m : gemm.k,
                                 gemm.b_major == Major::mn ? gemm.n : gemm.k, gemm.n})
    if (row % elements != 0)
      return fmt::format("rows of {} elements are not 16-byte aligned: use multiples of {}", row,
                         elements);
  return std::nullopt;
}

}  // namespace fftune
