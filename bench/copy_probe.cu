// How fast an H200 copies 512 KiB, 32 MiB and 256 MiB with a cold L2, by several ways to write the
// loop: what a memory-bound op can reach at all.
//
//   nvcc -O3 -std=c++17 -arch=sm_90a bench/copy_probe.cu -o copy_probe && ./copy_probe
//
// Each way is a CUDA graph of passes over sets of buffers that overflow the L2; the median of seven
// replays counts. `pdl`: programmatic dependent launch, so that a pass may start while the
// one before it drains.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "copy_probe: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

__device__ void wait_and_launch_dependents() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

__device__ std::uint64_t evict_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A thread has `vectors` accesses of 16 bytes in flight. With `barrier` the block stores nothing
// before all its loads are complete, as a sum over the row would require.
template <int vectors, int threads, bool barrier>
__global__ void __launch_bounds__(threads) copy_rows(const uint4* from, uint4* to) {
  wait_and_launch_dependents();
  const std::uint64_t policy = evict_first();
  const std::int64_t first = std::int64_t{blockIdx.x} * threads * vectors + threadIdx.x;
  uint4 value[vectors];
#pragma unroll
  for (int i = 0; i < vectors; ++i)
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(value[i].x), "=r"(value[i].y), "=r"(value[i].z), "=r"(value[i].w)
                 : "l"(from + first + i * threads), "l"(policy));
  if (barrier) __syncthreads();
#pragma unroll
  for (int i = 0; i < vectors; ++i)
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to + first +
                                                                                     i * threads),
                 "r"(value[i].x), "r"(value[i].y), "r"(value[i].z), "r"(value[i].w), "l"(policy)
                 : "memory");
}

// The time of an empty launch.
__global__ void empty_kernel() {
  wait_and_launch_dependents();
}

struct Sets {
  std::size_t bytes;
  std::vector<char*> from, to;
};

/// Microseconds of a pass; `copy` enqueues pass i.
template <typename Copy>
float microseconds(const Sets& sets, const Copy& copy) {
  const int passes = static_cast<int>(sets.from.size()) * 2;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  check(cudaStreamCreate(&stream));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < passes; ++i) copy(stream, static_cast<std::size_t>(i) % sets.from.size());
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&ready, graph, 0));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int round = 0; round < 8; ++round) {
    float milliseconds = 0;
    check(cudaEventRecord(begin, stream));
    check(cudaGraphLaunch(ready, stream));
    check(cudaEventRecord(end, stream));
    check(cudaEventSynchronize(end));
    check(cudaEventElapsedTime(&milliseconds, begin, end));
    if (round > 0) times.push_back(milliseconds * 1000 / static_cast<float>(passes));
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void say(const char* way, const Sets& sets, float us) {
  std::printf("%6zu KiB %-44s %7.2f us  %.2f TB/s\n", sets.bytes >> 10, way, us,
              2e-6 * static_cast<double>(sets.bytes) / us);
}

template <typename Kernel, typename... Arguments>
void launch(cudaStream_t stream, Kernel kernel, unsigned blocks, int threads, bool pdl,
            Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = static_cast<unsigned>(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = pdl ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, arguments...));
}

void try_nothing(const Sets& sets, bool pdl) {
  say(pdl ? "nothing, pdl" : "nothing", sets,
      microseconds(sets, [&](cudaStream_t stream, std::size_t) {
        launch(stream, empty_kernel, 64, 512, pdl);
      }));
}

template <int vectors, int threads, bool barrier>
void try_rows(const Sets& sets, bool pdl) {
  const float us = microseconds(sets, [&](cudaStream_t stream, std::size_t set) {
    launch(stream, copy_rows<vectors, threads, barrier>,
           static_cast<unsigned>(sets.bytes / 16 / threads / vectors), threads, pdl,
           reinterpret_cast<const uint4*>(sets.from[set]), reinterpret_cast<uint4*>(sets.to[set]));
  });
  char way[64];
  std::snprintf(way, sizeof way, "%d x 16 B, %d threads%s%s", vectors, threads,
                barrier ? ", barrier" : "", pdl ? ", pdl" : "");
  say(way, sets, us);
}

}  // namespace

int main() {
  constexpr std::size_t overflowing = 512 << 20;  // bytes of all sets together
  for (const std::size_t kibibytes : {512, 32768, 262144}) {
    Sets sets{kibibytes << 10, {}, {}};
    sets.from.resize(std::max<std::size_t>(3, overflowing / 2 / sets.bytes));
    sets.to = sets.from;
    for (auto* buffers : {&sets.from, &sets.to})
      for (char*& buffer : *buffers) {
        check(cudaMalloc(&buffer, sets.bytes));
        check(cudaMemset(buffer, 1, sets.bytes));
      }
    say("cudaMemcpyAsync", sets, microseconds(sets, [&](cudaStream_t stream, std::size_t set) {
          check(cudaMemcpyAsync(sets.to[set], sets.from[set], sets.bytes, cudaMemcpyDeviceToDevice,
                                stream));
        }));
    for (const bool pdl : {false, true}) {
      try_nothing(sets, pdl);
      try_rows<1, 128, false>(sets, pdl);
      try_rows<1, 256, false>(sets, pdl);
      try_rows<2, 256, false>(sets, pdl);
      try_rows<4, 256, false>(sets, pdl);
      try_rows<1, 512, true>(sets, pdl);
      try_rows<1, 1024, true>(sets, pdl);
      try_rows<2, 256, true>(sets, pdl);
      try_rows<4, 128, true>(sets, pdl);
    }
    for (const auto* buffers : {&sets.from, &sets.to})
      for (char* buffer : *buffers) check(cudaFree(buffer));
  }
}
