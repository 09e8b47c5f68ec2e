// Split-K of the sm_90a GEMM: the CTAs of a cluster that share the k of a tile add up their
// accumulators through distributed shared memory, in the order of the CTAs, so that the bits are
// the same every time. Accumulators go into shared memory of the CTA that reduces them, whose
// barrier counts the bytes: no CTA waits for another but for these.
#pragma once

#include "common/async.cuh"
#include "gemm/sm90/mainloop.cuh"

namespace fftune {

// Every CTA has all k of its tiles.
struct no_split_k {
  // One thread, at the start.
  static __device__ __forceinline__ void init(u32, u32) {}
  // The first of the columns of the MMAs that the CTA finishes.
  static __device__ __forceinline__ int first_column(u32) { return 0; }
};

// Each reducer finishes a share of the columns. `buffers` and `arrived` are the plan's reduction_at
// and reduction_barrier_at.
template <class Traits>
struct split_k_reduction {
  static constexpr sm90_config config = Traits::config;
  static constexpr sm90_plan plan = Traits::plan;
  static constexpr int b_operands = Traits::form.b_operands(), m64_tiles = plan.m64_tiles;
  static constexpr int values = plan.accumulators, reduced = plan.reduced_columns / 2;
  using accumulators = typename mma_mainloop<Traits>::accumulators;
  using fragment = float[m64_tiles][b_operands][reduced];  // what a thread finishes
  static constexpr u32 threads = config.mma_warpgroups * 128;

  u32 buffers, arrived, rank;

  static __device__ __forceinline__ void init(u32 base, u32 rank) {
    barrier_init(base + plan.reduction_barrier_at, 1);
    if (rank < plan.reducers) {
      barrier_arrive_expect(base + plan.reduction_barrier_at, plan.reduction_bytes);
    }
  }
  static __device__ __forceinline__ int first_column(u32 rank) {
    return static_cast<int>(rank) * plan.reduced_columns;
  }

  __device__ __forceinline__ void reduce(const accumulators& mine, fragment& total) const {
    constexpr int vectors = b_operands * m64_tiles * reduced / 4;
    const u32 thread = threadIdx.x;
    cluster_wait();  // the other CTAs have started, and their barriers are there
#pragma unroll
    for (int reducer = 0; reducer < plan.reducers; ++reducer) {
      if (reducer == static_cast<int>(rank)) continue;
      const u32 from = rank < reducer ? rank : rank - 1;  // a reducer has no buffer for itself
      const u32 to = cluster_address(buffers, reducer) + (from * vectors * threads + thread) * 16;
      const u32 barrier = cluster_address(arrived, reducer);
#pragma unroll
      for (int vector = 0; vector < vectors; ++vector) {
        const float* value =
            &mine[vector / (b_operands * reduced / 4)][vector / (reduced / 4) % b_operands]
                 [reducer * reduced + vector % (reduced / 4) * 4];
        store_cluster_async(to + vector * threads * 16,
                            make_float4(value[0], value[1], value[2], value[3]), barrier);
      }
    }
    if (rank >= plan.reducers) return;
    barrier_wait(arrived, 0);
#pragma unroll
    for (int vector = 0; vector < vectors; ++vector) {
      const int m64 = vector / (b_operands * reduced / 4);
      const int operand = vector / (reduced / 4) % b_operands;
      const int at = vector % (reduced / 4) * 4;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int cta = 0; cta < config.split_k; ++cta) {
        float4 term;
        if (cta == static_cast<int>(rank)) {
          term = own(mine[m64][operand], at);
        } else {
          const u32 from = cta < static_cast<int>(rank) ? cta : cta - 1;
          term = load_shared(buffers + ((from * vectors + vector) * threads + thread) * 16);
        }
        sum = make_float4(sum.x + term.x, sum.y + term.y, sum.z + term.z, sum.w + term.w);
      }
      total[m64][operand][at] = sum.x;
      total[m64][operand][at + 1] = sum.y;
      total[m64][operand][at + 2] = sum.z;
      total[m64][operand][at + 3] = sum.w;
    }
  }

 private:
  // This CTA's own accumulators of the columns that it finishes; a register array takes no index
  // known only at run time.
  __device__ __forceinline__ float4 own(const float (&mine)[values], int at) const {
    float4 value = make_float4(mine[at], mine[at + 1], mine[at + 2], mine[at + 3]);
#pragma unroll
    for (int reducer = 1; reducer < plan.reducers; ++reducer) {
      if (reducer == static_cast<int>(rank)) {
        const float* from = &mine[reducer * reduced + at];
        value = make_float4(from[0], from[1], from[2], from[3]);
      }
    }
    return value;
  }
};

// Split-K reduction of a grouped reduction: one CTA finishes a tile, and the others send it their
// accumulators, most often while it is still busy with its own K blocks.
template <class Traits>
struct single_cta_reduction {
  static constexpr int count =
      Traits::plan.m64_tiles * Traits::form.b_operands() * Traits::plan.accumulators;
  static constexpr u32 threads = Traits::config.mma_warpgroups * 128;
  static_assert(count % 4 == 0);
  static constexpr int vectors = count / 4, bytes = count * threads * 4;
  using accumulators = typename mma_mainloop<Traits>::accumulators;

  u32 buffers, arrived, rank;

  static __device__ __forceinline__ void init(u32 base, u32) {
    barrier_init(base + Traits::plan.reduction_barrier_at, 1);
  }
  static __device__ __forceinline__ int first_column(u32) { return 0; }

  __device__ __forceinline__ void send(const accumulators& acc, u32 reducer) const {
    const float* const mine = reinterpret_cast<const float*>(acc);
    const u32 to = cluster_address(buffers, reducer) + place_of(rank, reducer);
    const u32 barrier = cluster_address(arrived, reducer);
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      store_cluster_async(
          to + i * threads * 16,
          make_float4(mine[i * 4], mine[i * 4 + 1], mine[i * 4 + 2], mine[i * 4 + 3]), barrier);
    }
  }

  // Adds those of the CTAs whose bit is set in `senders`, in their order, when they have come. All
  // threads, once a kernel.
  __device__ __forceinline__ void receive(accumulators& acc, u32 senders) const {
    float* const mine = reinterpret_cast<float*>(acc);
    if (senders == 0) return;
    if (threadIdx.x == 0) barrier_arrive_expect(arrived, __popc(senders) * bytes);
    barrier_wait(arrived, 0);
#pragma unroll 1
    for (; senders != 0; senders &= senders - 1) {
      const u32 from = buffers + place_of(__ffs(senders) - 1, rank);
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

 private:
  // Where a CTA's accumulators go beside those of the others; the reducer has no place for itself.
  static __device__ __forceinline__ u32 place_of(u32 cta, u32 reducer) {
    return (cta < reducer ? cta : cta - 1) * bytes + threadIdx.x * 16;
  }
};

template <class Traits>
using split_k_of =
    typename choose_type<!Traits::splits_k, no_split_k,
                         typename choose_type<Traits::reduction, single_cta_reduction<Traits>,
                                              split_k_reduction<Traits>>::type>::type;

}  // namespace fftune
