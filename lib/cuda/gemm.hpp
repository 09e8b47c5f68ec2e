// A LibraryGemm step: one product by cuBLASLt, with the algorithm that was fastest here.
#pragma once

#include <cublasLt.h>

#include <memory>
#include <string>

#include "cuda/cublaslt.hpp"
#include "cuda/session.hpp"
#include "device/program.hpp"

namespace fftune::cuda {

/// What cuBLASLt may use besides the operands; the vendor's advice for Hopper is 32 MiB or more.
constexpr std::size_t gemm_workspace_bytes = std::size_t{64} << 20;

/// Where a call's matrices are, and their scales: 0 for none.
struct GemmAddresses {
  CUdeviceptr a = 0;
  CUdeviceptr b = 0;
  CUdeviceptr c = 0;
  CUdeviceptr a_scale = 0;
  CUdeviceptr b_scale = 0;
};

/// Immutable: any thread may enqueue it, each with a workspace of its own.
class GemmPlan {
 public:
  /// Times the library's top algorithms on buffers of its own, random and past the size of the L2.
  /// The context must be current. Throws Error(unavailable) if the library does not take the
  /// product or memory is short.
  GemmPlan(const std::shared_ptr<const Session>& session, std::shared_ptr<const CublasLt> library,
           const LibraryGemm& gemm, std::int64_t l2_bytes);

  /// Addresses are 256-byte aligned. Throws Error(device_fault).
  void enqueue(const GemmAddresses& at, CUdeviceptr workspace, CUstream stream) const;

  /// "cuBLASLt 13.0.2, algorithm 3 of 16"
  const std::string& description() const { return description_; }

 private:
  using Algorithms = std::vector<cublasLtMatmulHeuristicResult_t>;
  cublasStatus_t run(const cublasLtMatmulAlgo_t& algorithm, const GemmAddresses& at,
                     CUdeviceptr workspace, CUstream stream) const;
  Algorithms heuristics() const;
  std::size_t fastest(const std::shared_ptr<const Session>& session, const LibraryGemm& gemm,
                      std::int64_t l2_bytes, const Algorithms& algorithms) const;

  template <typename T>
  using Handle = std::shared_ptr<std::remove_pointer_t<T>>;

  std::shared_ptr<const CublasLt> library_;
  Handle<cublasLtMatmulDesc_t> operation_;
  Handle<cublasLtMatrixLayout_t> a_;
  Handle<cublasLtMatrixLayout_t> b_;
  Handle<cublasLtMatrixLayout_t> c_;
  cublasLtMatmulAlgo_t algorithm_{};
  float beta_ = 0;
  std::string description_;
};

}  // namespace fftune::cuda
