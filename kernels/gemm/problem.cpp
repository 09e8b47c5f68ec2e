#include "kernels/gemm/problem.hpp"

namespace fftune {

double GemmProblem::flops() const {
  // Every token, or row, is of one group: groups add nothing.
  return 2.0 * b_operands() * k_pairs() * outputs() * static_cast<double>(m) *
         static_cast<double>(n) * static_cast<double>(k);
}

}  // namespace fftune
