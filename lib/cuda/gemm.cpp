#include "cuda/gemm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "cuda/random_data.hpp"

namespace fftune::cuda {
namespace {

constexpr int requested_algorithms = 16;

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::fp16:
      return CUDA_R_16F;
    case DType::fp8:
      return CUDA_R_8F_E4M3;
    case DType::u8:
    case DType::i8:
    case DType::i32:
    case DType::i64:
      throw Error(ErrorKind::unavailable, "there is no library product of integers here");
    case DType::f32:
      break;
  }
  return CUDA_R_32F;
}

/// The operands of one product, several times over so that together they overflow the L2.
struct Operands {
  std::unique_ptr<Buffer> a, b, c;
};

std::vector<Operands> make_operands(const Session& session, const LibraryGemm& gemm,
                                    std::int64_t l2_bytes) {
  const auto element = static_cast<std::int64_t>(dtype_bytes(gemm.dtype));
  const auto c_element = static_cast<std::int64_t>(dtype_bytes(gemm.c_dtype()));
  const auto bytes = element * (gemm.m * gemm.k + gemm.n * gemm.k) + c_element * gemm.m * gemm.n;
  const auto sets = std::clamp<std::int64_t>(2 * l2_bytes / bytes + 1, 1, 64);
  std::vector<Operands> operands;
  for (std::int64_t i = 0; i < sets; ++i) {
    const auto make = [&](std::int64_t elements, const Buffer* like) {
      auto buffer = allocate(session.context(), static_cast<std::size_t>(elements * element));
      if (like == nullptr)
        fill_random(session, *buffer, gemm.dtype);
      else
        copy(session, buffer->data(), like->data(), buffer->bytes());
      return buffer;
    };
    const bool first = operands.empty();
    auto a = make(gemm.m * gemm.k, first ? nullptr : operands[0].a.get());
    auto b = make(gemm.n * gemm.k, first ? nullptr : operands[0].b.get());
    auto c = allocate(session.context(), static_cast<std::size_t>(gemm.m * gemm.n * c_element));
    operands.push_back({std::move(a), std::move(b), std::move(c)});
  }
  return operands;
}

}  // namespace

// cuBLASLt is column-major. Row-major c [m,n] is column-major cT [n,m], so cT = b · aT with b read
// as the transpose of its column-major view [k,n] and aT as its own view [k,m]: A is b transposed,
// B is a as it is. What lies transposed takes the other operation, and its view has the extents
// exchanged.
GemmPlan::GemmPlan(const std::shared_ptr<const Session>& session,
                   std::shared_ptr<const CublasLt> library, const LibraryGemm& gemm,
                   std::int64_t l2_bytes)
    : library_(std::move(library)), beta_(gemm.accumulates ? 1.0f : 0.0f) {
  if (gemm.m < 1 || gemm.n < 1 || gemm.k < 1)
    throw Error(ErrorKind::unavailable,
                fmt::format("a product of {}x{}x{}", gemm.m, gemm.n, gemm.k));
  const CublasLt& lt = *library_;
  cublasLtMatmulDesc_t operation = nullptr;
  lt.check(lt.desc_create(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  operation_.reset(operation, lt.desc_destroy);
  const cublasOperation_t of_b = gemm.b_transposed ? CUBLAS_OP_N : CUBLAS_OP_T;
  const cublasOperation_t of_a = gemm.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  lt.check(lt.desc_set(operation, CUBLASLT_MATMUL_DESC_TRANSA, &of_b, sizeof of_b),
           "cublasLtMatmulDescSetAttribute");
  lt.check(lt.desc_set(operation, CUBLASLT_MATMUL_DESC_TRANSB, &of_a, sizeof of_a),
           "cublasLtMatmulDescSetAttribute");
  const auto layout = [&](DType dtype, std::int64_t rows, std::int64_t columns) {
    cublasLtMatrixLayout_t made = nullptr;
    lt.check(lt.layout_create(&made, type_of(dtype), static_cast<std::uint64_t>(rows),
                              static_cast<std::uint64_t>(columns), rows),
             "cublasLtMatrixLayoutCreate");
    return Handle<cublasLtMatrixLayout_t>(made, lt.layout_destroy);
  };
  a_ = gemm.b_transposed ? layout(gemm.dtype, gemm.n, gemm.k) : layout(gemm.dtype, gemm.k, gemm.n);
  b_ = gemm.a_transposed ? layout(gemm.dtype, gemm.m, gemm.k) : layout(gemm.dtype, gemm.k, gemm.m);
  c_ = layout(gemm.c_dtype(), gemm.n, gemm.m);

  const auto algorithms = heuristics();
  const auto best = fastest(session, gemm, l2_bytes, algorithms);
  algorithm_ = algorithms[best].algo;
  description_ =
      fmt::format("cuBLASLt {}, algorithm {} of {}", lt.version(), best + 1, algorithms.size());
}

GemmPlan::Algorithms GemmPlan::heuristics() const {
  const CublasLt& lt = *library_;
  cublasLtMatmulPreference_t preference = nullptr;
  lt.check(lt.preference_create(&preference), "cublasLtMatmulPreferenceCreate");
  const Handle<cublasLtMatmulPreference_t> owner(preference, lt.preference_destroy);
  lt.check(lt.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                             &gemm_workspace_bytes, sizeof gemm_workspace_bytes),
           "cublasLtMatmulPreferenceSetAttribute");
  Algorithms algorithms(requested_algorithms);
  int count = 0;
  lt.check(lt.heuristic(lt.handle(), operation_.get(), a_.get(), b_.get(), c_.get(), c_.get(),
                        preference, requested_algorithms, algorithms.data(), &count),
           "cublasLtMatmulAlgoGetHeuristic");
  algorithms.resize(static_cast<std::size_t>(std::max(count, 0)));
  std::erase_if(algorithms, [](const auto& found) { return found.state != CUBLAS_STATUS_SUCCESS; });
  if (algorithms.empty())
    throw Error(ErrorKind::unavailable, "cuBLASLt has no algorithm for this product");
  return algorithms;
}

std::size_t GemmPlan::fastest(const std::shared_ptr<const Session>& session,
                              const LibraryGemm& gemm, std::int64_t l2_bytes,
                              const Algorithms& algorithms) const {
  if (algorithms.size() == 1) return 0;
  const auto operands = make_operands(*session, gemm, l2_bytes);
  const auto workspace = allocate(session->context(), gemm_workspace_bytes);
  const auto passes = std::max(4, static_cast<int>(operands.size()));
  std::size_t best = algorithms.size();
  double best_seconds = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < algorithms.size(); ++i) {
    const auto pass = [&](int index, void* stream) {
      const auto& set = operands[static_cast<std::size_t>(index) % operands.size()];
      return run(algorithms[i].algo,
                 {device_address(set.a->data()), device_address(set.b->data()),
                  device_address(set.c->data())},
                 device_address(workspace->data()), as_stream(stream));
    };
    // Once outside of a capture, so that the library loads what it needs.
    if (pass(0, session->stream()) != CUBLAS_STATUS_SUCCESS) continue;
    session->synchronize();
    const auto replay = capture(session, passes, [&](int index, void* stream) {
      library_->check(pass(index, stream), "cublasLtMatmul");
    });
    double seconds = replay->sample();
    constexpr int samples = 5;
    for (int sample = 1; sample < samples && seconds < 1.5 * best_seconds; ++sample)
      seconds = std::min(seconds, replay->sample());
    if (seconds < best_seconds) {
      best_seconds = seconds;
      best = i;
    }
  }
  if (best == algorithms.size())
    throw Error(ErrorKind::unavailable, "cuBLASLt: none of its algorithms ran this product");
  return best;
}

cublasStatus_t GemmPlan::run(const cublasLtMatmulAlgo_t& algorithm, const GemmAddresses& at,
                             CUdeviceptr workspace, CUstream stream) const {
  const float one = 1;
  const auto pointer = [](CUdeviceptr address) { return reinterpret_cast<void*>(address); };
  // The scales' addresses are part of the description, of which every call has a copy: the header
  // of the library says that it may be copied as plain data.
  cublasLtMatmulDescOpaque_t operation = *operation_;
  for (const auto& [attribute, address] :
       {std::pair{CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, pointer(at.b_scale)},
        {CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, pointer(at.a_scale)}}) {
    if (address == nullptr) continue;
    const auto status = library_->desc_set(&operation, attribute, &address, sizeof address);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  return library_->matmul(library_->handle(), &operation, &one, pointer(at.b), a_.get(),
                          pointer(at.a), b_.get(), &beta_, pointer(at.c), c_.get(), pointer(at.c),
                          c_.get(), &algorithm, pointer(workspace), gemm_workspace_bytes, stream);
}

void GemmPlan::enqueue(const GemmAddresses& at, CUdeviceptr workspace, CUstream stream) const {
  const auto status = run(algorithm_, at, workspace, stream);
  if (status == CUBLAS_STATUS_SUCCESS) return;
  try {
    library_->check(status, "cublasLtMatmul");
  } catch (const Error& error) {
    throw Error(ErrorKind::device_fault, error.what());
  }
}

}  // namespace fftune::cuda
