#include "cuda/gemm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/lookup.hpp"

namespace fftune::cuda {
namespace {

std::vector<std::byte> random_block(DType dtype, std::size_t elements) {
  std::vector<float> values(elements);
  std::uint64_t state = 0x9e3779b97f4a7c15u;
  for (float& value : values) {
    // xorshift64 (Marsaglia 2003), its upper 24 bits.
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    value = static_cast<float>(state >> 40) * 0x1p-23f - 1.0f;
  }
  std::vector<std::byte> bytes(elements * dtype_bytes(dtype));
  encode(dtype, values, bytes.data());
  return bytes;
}

}  // namespace

void fill_random(const Session& session, const Buffer& buffer, DType dtype) {
  constexpr std::size_t block_elements = std::size_t{1} << 20;
  const auto elements = std::min(block_elements, buffer.bytes() / dtype_bytes(dtype));
  if (elements == 0) return;
  const auto block = random_block(dtype, elements);
  const Driver& driver = session.driver();
  driver.check(driver.memcpy_htod_async(device_address(buffer.data()), block.data(), block.size(),
                                        session.stream()),
               "cuMemcpyHtoD");
  auto* const start = static_cast<std::byte*>(buffer.data());
  for (std::size_t done = block.size(); done < buffer.bytes();) {
    const auto bytes = std::min(done, buffer.bytes() - done);
    copy(session, start + done, start, bytes);
    done += bytes;
  }
  session.synchronize();  // the block goes away
}

namespace {

constexpr int requested_algorithms = 16;

cudaDataType_t cublas_type(DType dtype) {
  using enum DType;
  if (const auto found = find_value<DType, cudaDataType_t>(
          dtype,
          {{f32, CUDA_R_32F}, {bf16, CUDA_R_16BF}, {fp16, CUDA_R_16F}, {fp8, CUDA_R_8F_E4M3}}))
    return *found;
  throw Error(ErrorKind::unavailable, "there is no library product of integers here");
}

/// The operands of one product, several times over so that together they overflow the L2.
struct Operands {
  std::unique_ptr<Buffer> a, b, c;
};

std::vector<Operands> make_operands(const Session& session, const LibraryGemm& gemm,
                                    std::int64_t l2_bytes) {
  const auto element = static_cast<std::int64_t>(dtype_bytes(gemm.dtype));
  const auto c_element = static_cast<std::int64_t>(dtype_bytes(gemm.c_dtype()));
  const auto bytes =
      element * (gemm.a_elements() + gemm.b_elements()) + c_element * gemm.c_elements();
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
    auto a = make(gemm.a_elements(), first ? nullptr : operands[0].a.get());
    auto b = make(gemm.b_elements(), first ? nullptr : operands[0].b.get());
    auto c = allocate(session.context(), static_cast<std::size_t>(gemm.c_elements() * c_element));
    operands.push_back({std::move(a), std::move(b), std::move(c)});
  }
  return operands;
}

CublasLtProduct product_of(const CublasLt& library, const LibraryGemm& gemm) {
  if (gemm.m < 1 || gemm.n < 1 || gemm.k < 1 || gemm.batch.count < 1)
    throw Error(ErrorKind::unavailable,
                fmt::format("{} products of {}x{}x{}", gemm.batch.count, gemm.m, gemm.n, gemm.k));
  return {library,
          {CUBLAS_COMPUTE_32F, CUDA_R_32F, cublas_type(gemm.dtype), cublas_type(gemm.c_dtype())},
          gemm.m,
          gemm.n,
          gemm.k,
          gemm.a_transposed,
          gemm.b_transposed,
          gemm.batch};
}

}  // namespace

GemmPlan::GemmPlan(const std::shared_ptr<const Session>& session,
                   std::shared_ptr<const CublasLt> library, const LibraryGemm& gemm,
                   std::int64_t l2_bytes, AlgorithmChoice choice)
    : library_(std::move(library)),
      product_(product_of(*library_, gemm)),
      beta_(gemm.accumulates ? 1.0f : 0.0f) {
  const auto algorithms = product_.algorithms(*library_, requested_algorithms);
  const auto best = choice == AlgorithmChoice::first ? std::size_t{0}
                                                     : fastest(session, gemm, l2_bytes, algorithms);
  algorithm_ = algorithms[best].algo;
  description_ = fmt::format("cuBLASLt {}, algorithm {} of {}", library_->version(), best + 1,
                             algorithms.size());
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
  // The scales' addresses are part of the description, so every call has a copy: the header of the
  // library says that it may be copied as plain data.
  cublasLtMatmulDescOpaque_t operation = *product_.operation();
  for (const auto& [attribute, address] :
       {std::pair{CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, pointer(at.b_scale)},
        {CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, pointer(at.a_scale)}}) {
    if (address == nullptr) continue;
    const auto status = library_->desc_set(&operation, attribute, &address, sizeof address);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  return library_->matmul(library_->handle(), &operation, &one, pointer(at.b), product_.b(),
                          pointer(at.a), product_.a(), &beta_, pointer(at.c), product_.c(),
                          pointer(at.c), product_.c(), &algorithm, pointer(workspace),
                          gemm_workspace_bytes, stream);
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
