// A LibraryGemm step: one product by cuBLASLt, with the algorithm that was fastest here.
#pragma once

#include <cublasLt.h>

#include <memory>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "cuda/cublaslt_product.hpp"
#include "cuda/session.hpp"
#include "device/backend.hpp"
#include "device/program.hpp"

namespace fftune::cuda {

/// Where a call's matrices are, and their scales: 0 for none.
struct GemmAddresses {
  CUdeviceptr a = 0;
  CUdeviceptr b = 0;
  CUdeviceptr c = 0;
  CUdeviceptr a_scale = 0;
  CUdeviceptr b_scale = 0;
};

/// Selects one of the library's top algorithms: the fastest here, which is measured, or the one
/// that the library names first.
enum class AlgorithmChoice { fastest, first };

/// Immutable: any thread may enqueue it, each with a workspace of its own.
class GemmPlan {
 public:
  /// Algorithms are timed on buffers of its own, random and past the size of the L2.
  /// The context must be current. Throws Error(unavailable) if the library does not take the
  /// product or memory is short.
  GemmPlan(const std::shared_ptr<const Session>& session, std::shared_ptr<const CublasLt> library,
           const LibraryGemm& gemm, std::int64_t l2_bytes,
           AlgorithmChoice choice = AlgorithmChoice::fastest);

  /// Addresses are 256-byte aligned. Throws Error(device_fault).
  void enqueue(const GemmAddresses& at, CUdeviceptr workspace, CUstream stream) const;

  /// "cuBLASLt 13.0.2, algorithm 3 of 16"
  const std::string& description() const { return description_; }

 private:
  using Algorithms = std::vector<cublasLtMatmulHeuristicResult_t>;
  cublasStatus_t run(const cublasLtMatmulAlgo_t& algorithm, const GemmAddresses& at,
                     CUdeviceptr workspace, CUstream stream) const;
  std::size_t fastest(const std::shared_ptr<const Session>& session, const LibraryGemm& gemm,
                      std::int64_t l2_bytes, const Algorithms& algorithms) const;

  std::shared_ptr<const CublasLt> library_;
  CublasLtProduct product_;
  cublasLtMatmulAlgo_t algorithm_{};
  float beta_ = 0;
  std::string description_;
};

// Random numbers in device memory: a GEMM on zeros draws less power and runs faster than a real
// one.

/// Fills `buffer` with numbers of `dtype`, uniform in [-1, 1), the same ones each time; a block of
/// 2^20 elements repeats. The context must be current.
void fill_random(const Session& session, const Buffer& buffer, DType dtype);

}  // namespace fftune::cuda
