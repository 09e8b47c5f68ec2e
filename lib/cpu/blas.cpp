#include "cpu/blas.hpp"

#include <cblas.h>

#include <condition_variable>
#include <mutex>

namespace fftune {
namespace {

/// OpenBLAS's thread count belongs to the process, and so must what guards it.
struct ThreadCount {
  std::mutex mutex;
  std::condition_variable changed;
  int holders = 0;
  int held = 0;      // while holders > 0
  int original = 0;  // likewise
};

ThreadCount& thread_count() {
  static ThreadCount count;
  return count;
}

}  // namespace

std::string blas_version() {
  // "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH NO_AFFINITY Zen MAX_THREADS=64"
  const std::string config = openblas_get_config();
  const auto name = config.find(' ');
  return name == config.npos ? config : config.substr(0, config.find(' ', name + 1));
}

std::string blas_description() {
  return std::string(openblas_get_config()) + ", kernels for " + openblas_get_corename();
}

BlasThreads::BlasThreads(int threads) {
  auto& count = thread_count();
  std::unique_lock lock(count.mutex);
  count.changed.wait(lock, [&] { return count.holders == 0 || count.held == threads; });
  if (count.holders++ > 0) return;
  count.original = openblas_get_num_threads();
  count.held = threads;
  if (count.original != threads) openblas_set_num_threads(threads);
}

BlasThreads::~BlasThreads() {
  auto& count = thread_count();
  {
    const std::lock_guard lock(count.mutex);
    if (--count.holders > 0) return;
    if (count.original != count.held) openblas_set_num_threads(count.original);
  }
  count.changed.notify_all();
}

namespace {

blasint size(std::int64_t value) {
  return static_cast<blasint>(value);
}

// b comes as [n,k], which is the transpose of what BLAS multiplies by.
template <typename View>
CBLAS_TRANSPOSE first(const View& a) {
  return a.transposed ? CblasTrans : CblasNoTrans;
}
template <typename View>
CBLAS_TRANSPOSE second(const View& b) {
  return b.transposed ? CblasNoTrans : CblasTrans;
}

}  // namespace

void sgemm(std::int64_t m, std::int64_t n, std::int64_t k, MatrixView a, MatrixView b, float beta,
           float* c, std::int64_t c_stride) {
  cblas_sgemm(CblasRowMajor, first(a), second(b), size(m), size(n), size(k), 1.0f, a.data,
              size(a.stride), b.data, size(b.stride), beta, c, size(c_stride));
}

void dgemm(std::int64_t m, std::int64_t n, std::int64_t k, DoubleMatrixView a, DoubleMatrixView b,
           double beta, double* c, std::int64_t c_stride) {
  cblas_dgemm(CblasRowMajor, first(a), second(b), size(m), size(n), size(k), 1.0, a.data,
              size(a.stride), b.data, size(b.stride), beta, c, size(c_stride));
}

}  // namespace fftune
