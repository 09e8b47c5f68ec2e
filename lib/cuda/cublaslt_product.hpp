// A row-major product as cuBLASLt, which is column-major, describes it.
#pragma once

#include <cublasLt.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "cuda/cublaslt.hpp"
#include "cuda/session.hpp"
#include "device/program.hpp"

namespace fftune::cuda {

/// Workspace that cuBLASLt may use; the vendor's advice for Hopper is 32 MiB or more.
constexpr std::size_t gemm_workspace_bytes = std::size_t{64} << 20;

/// c [m,n] = a [m,k] · b [n,k]ᵀ. An operand that is transposed lies as [k,m] or [k,n]. The library
/// calls b A, and a B.
class CublasLtProduct {
 public:
  struct Types {
    cublasComputeType_t compute;
    cudaDataType_t scale;
    cudaDataType_t operands;
    cudaDataType_t c;
  };

  /// Throws Error(unavailable) if the library does not take the product.
  CublasLtProduct(const CublasLt& library, const Types& types, std::int64_t m, std::int64_t n,
                  std::int64_t k, bool a_transposed, bool b_transposed,
                  const LibraryGemm::Batch& batch = {});

  /// Up to `most` algorithms within gemm_workspace_bytes, the most promising one first. Throws
  /// Error(unavailable) if there is none.
  std::vector<cublasLtMatmulHeuristicResult_t> algorithms(const CublasLt& library, int most) const;

  cublasLtMatmulDesc_t operation() const { return operation_.get(); }
  cublasLtMatrixLayout_t a() const { return a_.get(); }
  cublasLtMatrixLayout_t b() const { return b_.get(); }
  cublasLtMatrixLayout_t c() const { return c_.get(); }

 private:
  template <typename T>
  using Handle = std::shared_ptr<std::remove_pointer_t<T>>;

  Handle<cublasLtMatmulDesc_t> operation_;
  Handle<cublasLtMatrixLayout_t> a_, b_, c_;
};

// A product in float64 of matrices on the host, by cuBLASLt.

/// The context must be current. Throws Error(unavailable) if the library does not take the product
/// or memory is short, Error(device_fault).
void double_product(const Session& session, const CublasLt& library, const DoubleProduct& product);

}  // namespace fftune::cuda
