#include "cuda/double_product.hpp"

#include <memory>
#include <type_traits>

#include "core/error.hpp"
#include "cuda/gemm.hpp"

namespace fftune::cuda {
namespace {

template <typename T>
using Handle = std::unique_ptr<std::remove_pointer_t<T>, cublasStatus_t (*)(T)>;

std::unique_ptr<Buffer> upload(const Session& session, const double* from, std::int64_t elements) {
  auto buffer = allocate(session.context(), static_cast<std::size_t>(elements) * sizeof *from);
  session.driver().check(session.driver().memcpy_htod_async(device_address(buffer->data()), from,
                                                            buffer->bytes(), session.stream()),
                         "cuMemcpyHtoD");
  return buffer;
}

}  // namespace

// As in GemmPlan, the library's column-major product is cT [n,m] = b · aT.
void double_product(const Session& session, const CublasLt& lt, const DoubleProduct& product) {
  const auto [m, n, k, a, b, a_transposed, b_transposed, c] = product;
  cublasLtMatmulDesc_t made = nullptr;
  lt.check(lt.desc_create(&made, CUBLAS_COMPUTE_64F, CUDA_R_64F), "cublasLtMatmulDescCreate");
  const Handle<cublasLtMatmulDesc_t> operation(made, lt.desc_destroy);
  const cublasOperation_t of_b = b_transposed ? CUBLAS_OP_N : CUBLAS_OP_T;
  const cublasOperation_t of_a = a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  lt.check(lt.desc_set(made, CUBLASLT_MATMUL_DESC_TRANSA, &of_b, sizeof of_b),
           "cublasLtMatmulDescSetAttribute");
  lt.check(lt.desc_set(made, CUBLASLT_MATMUL_DESC_TRANSB, &of_a, sizeof of_a),
           "cublasLtMatmulDescSetAttribute");
  const auto layout = [&](std::int64_t rows, std::int64_t columns) {
    cublasLtMatrixLayout_t of = nullptr;
    lt.check(lt.layout_create(&of, CUDA_R_64F, static_cast<std::uint64_t>(rows),
                              static_cast<std::uint64_t>(columns), rows),
             "cublasLtMatrixLayoutCreate");
    return Handle<cublasLtMatrixLayout_t>(of, lt.layout_destroy);
  };
  const auto b_layout = b_transposed ? layout(n, k) : layout(k, n);
  const auto a_layout = a_transposed ? layout(m, k) : layout(k, m);
  const auto c_layout = layout(n, m);

  cublasLtMatmulPreference_t preference = nullptr;
  lt.check(lt.preference_create(&preference), "cublasLtMatmulPreferenceCreate");
  const Handle<cublasLtMatmulPreference_t> owner(preference, lt.preference_destroy);
  lt.check(lt.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                             &gemm_workspace_bytes, sizeof gemm_workspace_bytes),
           "cublasLtMatmulPreferenceSetAttribute");
  cublasLtMatmulHeuristicResult_t best{};
  int count = 0;
  lt.check(lt.heuristic(lt.handle(), made, b_layout.get(), a_layout.get(), c_layout.get(),
                        c_layout.get(), preference, 1, &best, &count),
           "cublasLtMatmulAlgoGetHeuristic");
  if (count < 1 || best.state != CUBLAS_STATUS_SUCCESS)
    throw Error(ErrorKind::unavailable, "cuBLASLt has no algorithm for a product in float64");

  const auto on_device_a = upload(session, a, m * k), on_device_b = upload(session, b, n * k);
  const auto on_device_c =
      allocate(session.context(), static_cast<std::size_t>(m * n) * sizeof(double));
  const auto workspace = allocate(session.context(), gemm_workspace_bytes);
  const double one = 1;
  const double zero = 0;
  lt.check(lt.matmul(lt.handle(), made, &one, on_device_b->data(), b_layout.get(),
                     on_device_a->data(), a_layout.get(), &zero, on_device_c->data(),
                     c_layout.get(), on_device_c->data(), c_layout.get(), &best.algo,
                     workspace->data(), gemm_workspace_bytes, session.stream()),
           "cublasLtMatmul");
  session.driver().check(session.driver().memcpy_dtoh_async(c, device_address(on_device_c->data()),
                                                            on_device_c->bytes(), session.stream()),
                         "cuMemcpyDtoH");
  session.synchronize();
}

}  // namespace fftune::cuda
