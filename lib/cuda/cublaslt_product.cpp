#include "cuda/cublaslt_product.hpp"

#include <algorithm>
#include <memory>

#include "core/error.hpp"

namespace fftune::cuda {

// Row-major c [m,n] is column-major cT [n,m], so cT = b · aT with b read as the transpose of its
// column-major view [k,n] and aT as its own view [k,m]: A is b transposed, B is a as it is. A
// transposed operand takes the other operation, and its view has the extents exchanged.
CublasLtProduct::CublasLtProduct(const CublasLt& lt, const Types& types, std::int64_t m,
                                 std::int64_t n, std::int64_t k, bool a_transposed,
                                 bool b_transposed, const LibraryGemm::Batch& batch) {
  cublasLtMatmulDesc_t operation = nullptr;
  lt.check(lt.desc_create(&operation, types.compute, types.scale), "cublasLtMatmulDescCreate");
  operation_.reset(operation, lt.desc_destroy);
  const cublasOperation_t of_b = b_transposed ? CUBLAS_OP_N : CUBLAS_OP_T;
  const cublasOperation_t of_a = a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  lt.check(lt.desc_set(operation, CUBLASLT_MATMUL_DESC_TRANSA, &of_b, sizeof of_b),
           "cublasLtMatmulDescSetAttribute");
  lt.check(lt.desc_set(operation, CUBLASLT_MATMUL_DESC_TRANSB, &of_a, sizeof of_a),
           "cublasLtMatmulDescSetAttribute");
  const auto layout = [&](cudaDataType_t type, std::int64_t rows, std::int64_t columns,
                          std::int64_t stride) {
    cublasLtMatrixLayout_t made = nullptr;
    lt.check(lt.layout_create(&made, type, static_cast<std::uint64_t>(rows),
                              static_cast<std::uint64_t>(columns), rows),
             "cublasLtMatrixLayoutCreate");
    Handle<cublasLtMatrixLayout_t> owner(made, lt.layout_destroy);
    if (batch.count > 1) {
      const auto count = static_cast<std::int32_t>(batch.count);
      lt.check(lt.layout_set(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count),
               "cublasLtMatrixLayoutSetAttribute");
      lt.check(
          lt.layout_set(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride),
          "cublasLtMatrixLayoutSetAttribute");
    }
    return owner;
  };
  b_ = b_transposed ? layout(types.operands, n, k, batch.b) : layout(types.operands, k, n, batch.b);
  a_ = a_transposed ? layout(types.operands, m, k, batch.a) : layout(types.operands, k, m, batch.a);
  c_ = layout(types.c, n, m, batch.c);
}

std::vector<cublasLtMatmulHeuristicResult_t> CublasLtProduct::algorithms(const CublasLt& lt,
                                                                         int most) const {
  cublasLtMatmulPreference_t preference = nullptr;
  lt.check(lt.preference_create(&preference), "cublasLtMatmulPreferenceCreate");
  const Handle<cublasLtMatmulPreference_t> owner(preference, lt.preference_destroy);
  lt.check(lt.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                             &gemm_workspace_bytes, sizeof gemm_workspace_bytes),
           "cublasLtMatmulPreferenceSetAttribute");
  std::vector<cublasLtMatmulHeuristicResult_t> algorithms(static_cast<std::size_t>(most));
  int count = 0;
  lt.check(lt.heuristic(lt.handle(), operation(), b(), a(), c(), c(), preference, most,
                        algorithms.data(), &count),
           "cublasLtMatmulAlgoGetHeuristic");
  algorithms.resize(static_cast<std::size_t>(std::max(count, 0)));
  std::erase_if(algorithms, [](const auto& found) { return found.state != CUBLAS_STATUS_SUCCESS; });
  if (algorithms.empty())
    throw Error(ErrorKind::unavailable, "cuBLASLt has no algorithm for this product");
  return algorithms;
}

namespace {

std::unique_ptr<Buffer> upload(const Session& session, const double* from, std::int64_t elements) {
  auto buffer = allocate(session.context(), static_cast<std::size_t>(elements) * sizeof *from);
  session.driver().check(session.driver().memcpy_htod_async(device_address(buffer->data()), from,
                                                            buffer->bytes(), session.stream()),
                         "cuMemcpyHtoD");
  return buffer;
}

}  // namespace

void double_product(const Session& session, const CublasLt& lt, const DoubleProduct& product) {
  const auto [m, n, k, a, b, a_transposed, b_transposed, c] = product;
  const CublasLtProduct description(lt, {CUBLAS_COMPUTE_64F, CUDA_R_64F, CUDA_R_64F, CUDA_R_64F}, m,
                                    n, k, a_transposed, b_transposed);
  const auto best = description.algorithms(lt, 1).front();

  const auto on_device_a = upload(session, a, m * k), on_device_b = upload(session, b, n * k);
  const auto on_device_c =
      allocate(session.context(), static_cast<std::size_t>(m * n) * sizeof(double));
  const auto workspace = allocate(session.context(), gemm_workspace_bytes);
  const double one = 1;
  const double zero = 0;
  lt.check(lt.matmul(lt.handle(), description.operation(), &one, on_device_b->data(),
                     description.b(), on_device_a->data(), description.a(), &zero,
                     on_device_c->data(), description.c(), on_device_c->data(), description.c(),
                     &best.algo, workspace->data(), gemm_workspace_bytes, session.stream()),
           "cublasLtMatmul");
  session.driver().check(session.driver().memcpy_dtoh_async(c, device_address(on_device_c->data()),
                                                            on_device_c->bytes(), session.stream()),
                         "cuMemcpyDtoH");
  session.synchronize();
}

}  // namespace fftune::cuda
