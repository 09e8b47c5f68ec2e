// Small kernels for the tests.
#pragma once

#include <map>
#include <string>

#include "device/sources.hpp"

namespace fftune::testing {

inline SourceSet test_kernels() {
  const std::map<std::string, std::string> files{
      {"common/types.cuh", "#pragma once\nusing index_t = long long;\n"},
      {"common/scaled.cuh",
       "#pragma once\n#include \"common/types.cuh\"\n"
       "__device__ inline float scaled(float x, float by) { return x * by; }\n"},
      {"test/scale.cu", R"(#include "common/scaled.cuh"
template <int threads>
__global__ void scale(const float* x, float* y, float by, index_t count) {
  const index_t i = index_t(blockIdx.x) * threads + threadIdx.x;
  if (i < count) y[i] = scaled(x[i], by);
}
)"},
      // Each block adds one to a counter, which must start at zero, and writes an offset to out.
      {"test/count.cu", R"(
template <typename T>
__global__ void count(unsigned* counter, T* out, int offset) {
  const unsigned before = atomicAdd(counter, 1u);
  if (before == gridDim.x - 1) *out = T(before + 1 + offset);
}
)"},
      // Its dynamic shared memory is cleared and read again, all of it.
      {"test/shared.cu", R"(
template <int words>
__global__ void shared(int* out) {
  extern __shared__ int memory[];
  for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = i;
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = memory[words - 1];
}
template <int threads>
__global__ void __launch_bounds__(threads) bounded(int* out) { out[threadIdx.x] = 1; }
template <int bytes>
__global__ void static_shared(int* out) {
  __shared__ int memory[bytes / 4];
  memory[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = memory[bytes / 4 - 1 - threadIdx.x];
}
)"},
      {"test/fault.cu", R"(
template <int value>
__global__ void fault(int* out) { *reinterpret_cast<volatile int*>(long(value)) = *out; }
)"},
      {"test/cluster.cu", R"(
template <int blocks>
__global__ void cluster(int* out) {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) out[blockIdx.x] = int(rank) + blocks;
}
)"},
      // Copies the box at (column, row) of a matrix by TMA, unswizzled by hand:
      // one row of 32 bytes needs none.
      {"test/tma.cu", R"(
struct alignas(64) TensorMap { unsigned long long words[16]; };
template <int columns>
__global__ void tma(const __grid_constant__ TensorMap map, float* out, int column, int row) {
  __shared__ alignas(1024) float box[columns];
  __shared__ alignas(8) unsigned long long barrier;
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(box));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at),
                 "r"(unsigned(columns * 4)));
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(at)
        : "memory");
  }
  __syncthreads();
  asm volatile(
      "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0; "
      "@!done bra again; }" ::"r"(at) : "memory");
  if (threadIdx.x < columns) out[threadIdx.x] = box[threadIdx.x];
}
)"},
      {"test/broken.cu",
       "template <int n>\n__global__ void broken(int* x) {\n  x[0] = nothing;\n}\n"},
  };
  return SourceSet(files);
}

}  // namespace fftune::testing
