#include "cuda/double_product.hpp"

#include <memory>

#include "cuda/cublaslt_product.hpp"

namespace fftune::cuda {
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
