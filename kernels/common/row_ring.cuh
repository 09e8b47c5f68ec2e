// Rows on their way to a thread in shared memory: more of them than registers hold. Each thread
// copies what it alone reads, so that nothing but its own copies has to be waited for.
#pragma once

#include "common/async_copy.cuh"
#include "common/packet.cuh"
#include "common/vector.cuh"

namespace fftune {

// `rows` rows of `tensors` tensors, of which each of `threads` threads has `vectors` times 16
// bytes. Neighbouring threads have neighbouring bytes: no two of a quarter warp meet in a bank.
template <class T, int rows, int tensors, int vectors, int threads>
struct row_ring {
  static constexpr int count = 16 / static_cast<int>(sizeof(T));
  vector16 place[rows][tensors][vectors][threads];

  __device__ __forceinline__ void* at(int row, int tensor, int vector) {
    return &place[row][tensor][vector][threadIdx.x];
  }

  // Starts the copy of what no other thread reads; what is not `valid` becomes zeros.
  __device__ __forceinline__ void fetch(int row, int tensor, int vector, const T* address,
                                        bool valid, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(
                     shared_address(at(row, tensor, vector))),
                 "l"(address), "r"(valid ? 16u : 0u), "l"(policy)
                 : "memory");
  }

  __device__ __forceinline__ packet<T, count> take(int row, int tensor, int vector) {
    const vector16 value = *static_cast<const vector16*>(at(row, tensor, vector));
    packet<T, count> result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result.word[i] = value.word[i];
    return result;
  }
};

}  // namespace fftune
