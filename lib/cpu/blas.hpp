// OpenBLAS: its matrix product, and its thread count, which it keeps for the whole process. It is
// opened at the first product, not before: its threads take memory of their own.
#pragma once

#include <cstdint>
#include <string>

namespace fftune {

/// Begins what blas_version() returns where there is none.
constexpr const char* no_blas = "no OpenBLAS";
/// "OpenBLAS 0.3.21", by the name of its file, without opening it; or why it cannot be used:
/// "no OpenBLAS: libopenblas.so.0 is not in the loader's folders". That is so too where less
/// memory can be mapped than its threads take: by ulimit -v or -d, by the system, or by a control
/// group.
std::string blas_version();
/// The file that would be opened; empty if there is none.
std::string blas_file();

/// Holds OpenBLAS at a number of threads, or at those that it had before where these are fewer.
/// Leases of the same number, of any threads, hold it together; one of another number waits until
/// they are gone. The last to go restores the number found at first. A thread must not take a lease
/// while it holds one of another number.
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
/// Sizes and strides are at most 2^31 - 1. Throws Error(unavailable) where there is no OpenBLAS.
void sgemm(std::int64_t m, std::int64_t n, std::int64_t k, MatrixView a, MatrixView b, float beta,
           float* c, std::int64_t c_stride);

/// The same in f64, by plain loops where there is no OpenBLAS: references need it.
struct DoubleMatrixView {
  const double* data;
  std::int64_t stride;
  bool transposed = false;
};
void dgemm(std::int64_t m, std::int64_t n, std::int64_t k, DoubleMatrixView a, DoubleMatrixView b,
           double beta, double* c, std::int64_t c_stride);

}  // namespace fftune
