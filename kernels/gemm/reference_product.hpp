// A GEMM in float64, for references.
#pragma once

#include <cstdint>

#include "cpu/blas.hpp"
#include "device/program.hpp"

namespace fftune {

/// c [m,n] = a [m,k] · b [n,k]ᵀ + beta·c. A large one uses Parallel::multiply if that is available;
/// else the threads divide the longer side of c.
void reference_product(Parallel& parallel, std::int64_t m, std::int64_t n, std::int64_t k,
                       const DoubleMatrixView& a, const DoubleMatrixView& b, double beta,
                       double* c);

}  // namespace fftune
