// The library's matrix product, and its thread count, which OpenBLAS keeps for the whole process.
#pragma once

#include <cstdint>
#include <string>

namespace fftune {

/// "OpenBLAS 0.3.21".
std::string blas_version();
/// The library's own words on how it was built, and the processor it runs kernels for.
std::string blas_description();

/// Holds OpenBLAS at a number of threads. Leases of the same number, of any threads, hold it
/// together; one of another number waits until they are gone. The last to go restores the number
/// found at first. A thread must not take a lease while it holds one of another number.
class BlasThreads {
 public:
  explicit BlasThreads(int threads);
  ~BlasThreads();
  BlasThreads(const BlasThreads&) = delete;
  BlasThreads& operator=(const BlasThreads&) = delete;
};

/// A matrix of f32, row-major, with the distance between rows in elements. Where it is transposed,
/// what lies there is the matrix's transpose.
struct MatrixView {
  const float* data;
  std::int64_t stride;
  bool transposed = false;
};

/// c [m,n] = a [m,k] · b [n,k]ᵀ + beta·c, on as many threads as the caller's BlasThreads says.
/// Sizes and strides are at most 2^31 - 1.
void sgemm(std::int64_t m, std::int64_t n, std::int64_t k, MatrixView a, MatrixView b, float beta,
           float* c, std::int64_t c_stride);

/// The same in f64.
struct DoubleMatrixView {
  const double* data;
  std::int64_t stride;
  bool transposed = false;
};
void dgemm(std::int64_t m, std::int64_t n, std::int64_t k, DoubleMatrixView a, DoubleMatrixView b,
           double beta, double* c, std::int64_t c_stride);

}  // namespace fftune
