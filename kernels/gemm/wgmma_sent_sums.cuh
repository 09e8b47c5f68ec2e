// Sums of a tile that several blocks of a cluster have parts of, and one of them finishes: the
// others send it theirs, each into a place of its own in the owner's shared memory.
#pragma once

#include "common/barrier.cuh"
#include "common/cluster.cuh"

namespace fftune {

// `threads` of a block have the sums of a tile, `count` of them each.
template <int count, int threads>
struct wgmma_sent_sums {
  static_assert(count % 4 == 0);
  static constexpr int vectors = count / 4, bytes = count * threads * 4;

  // Where a block's sums go beside those of the others; the owner has no place for itself.
  static __device__ __forceinline__ u32 place_of(u32 block, u32 owner) {
    return (block < owner ? block : block - 1) * bytes + threadIdx.x * 16;
  }

  // Sends the sums of the block `rank` to `owner`, whose barrier `arrived` counts the bytes and is
  // there.
  static __device__ __forceinline__ void send(const float (&mine)[count], u32 places, u32 arrived,
                                              u32 rank, u32 owner) {
    const u32 to = cluster_address(places, owner) + place_of(rank, owner);
    const u32 barrier = cluster_address(arrived, owner);
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      store_cluster_async(
          to + i * threads * 16,
          make_float4(mine[i * 4], mine[i * 4 + 1], mine[i * 4 + 2], mine[i * 4 + 3]), barrier);
    }
  }

  // Adds those of the blocks whose bit is set in `senders`, in their order, when they have come.
  // All threads, once a kernel.
  static __device__ __forceinline__ void receive(float (&mine)[count], u32 places, u32 arrived,
                                                 u32 senders, u32 owner) {
    if (senders == 0) return;
    if (threadIdx.x == 0) barrier_arrive_expect(arrived, __popc(senders) * bytes);
    barrier_wait(arrived, 0);
#pragma unroll 1
    for (; senders != 0; senders &= senders - 1) {
      const u32 from = places + place_of(__ffs(senders) - 1, owner);
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        const float4 term = load_shared(from + i * threads * 16);
        mine[i * 4] += term.x;
        mine[i * 4 + 1] += term.y;
        mine[i * 4 + 2] += term.z;
        mine[i * 4 + 3] += term.w;
      }
    }
  }
};

}  // namespace fftune
