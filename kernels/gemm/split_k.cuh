// Deterministic split-K within one launch: the `split_k` blocks of a tile (blockIdx.y) each sum a
// share of k, and one of them adds the shares up in the order of the splits. No float atomics, so
// the same bits every time.
//
// On sm_90 and newer the blocks of a tile are a cluster, and the accumulators travel through
// distributed shared memory: no workspace at all. Elsewhere they travel through a workspace, and an
// integer counter per tile tells which block arrives last and so adds up; it reads every share, its
// own included, so that the order does not depend on it.
#pragma once

#include "common/async.cuh"
#include "common/vectors.cuh"

namespace fftune {

struct split_k_workspace {
  u32* counters;    // [tiles], zero before the launch and zero again after it; null: the launch has
                    // clusters
  float* partials;  // [tiles, split_k, values of a tile], 16-byte aligned
};

// Counts this block's arrival and tells every thread whether the block is the last of its tile. All
// threads of the block call it after their stores to the workspace; in the last block those of
// every other block are visible afterwards.
__device__ __forceinline__ bool arrive_last(u32* counter, int split_k, bool* shared_flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const u32 last = split_k - 1;
    *shared_flag = atomicInc(counter, last) == last;  // wraps to 0
  }
  __syncthreads();
  const bool is_last = *shared_flag;
  if (is_last) {
    __threadfence();
  }
  return is_last;
}

// Adds the shares of the splits [first_split, split_k) to `values`, in order; `load(split, i)`
// yields vector i of a share. A few vectors at a time: loads that are in flight together need
// registers, and a large tile's accumulators already fill them.
template <int vectors, class Load>
__device__ __forceinline__ void add_shares(float4 (&values)[vectors], int first_split, int split_k,
                                           Load load) {
  constexpr int batch = 8;
#pragma unroll
  for (int first = 0; first < vectors; first += batch) {
#pragma unroll 1
    for (int split = first_split; split < split_k; ++split) {
#pragma unroll
      for (int i = first; i < smaller(first + batch, vectors); ++i) {
        add(values[i], load(split, i));
      }
    }
  }
}

template <int threads, int vectors>
__device__ __forceinline__ bool reduce_through_workspace(float4 (&values)[vectors], bool active,
                                                         int split_k,
                                                         const split_k_workspace& workspace,
                                                         bool* shared_flag) {
  constexpr int share = threads * vectors * 4;  // floats
  float* const tile =
      workspace.partials + static_cast<i64>(blockIdx.x) * split_k * share + threadIdx.x * 4;
  float* const mine = tile + static_cast<i64>(blockIdx.y) * share;
  if (active) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      store_coherent(mine + i * threads * 4, values[i]);
      values[i] = {};
    }
  }
  if (!arrive_last(workspace.counters + blockIdx.x, split_k, shared_flag)) {
    return false;
  }
  if (active) {
    add_shares(values, 0, split_k, [=](int split, int i) {
      return load_coherent(tile + static_cast<i64>(split) * share + i * threads * 4);
    });
  }
  return true;
}

template <int threads, int vectors>
__device__ __forceinline__ bool reduce_through_cluster(float4 (&values)[vectors], bool active,
                                                       int split_k, void* shared) {
  const u32 place = shared_address(shared) + threadIdx.x * 16;
  const bool collects = blockIdx.y == 0;
  if (active && !collects) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      store_shared(place + i * threads * 16, values[i]);
    }
  }
  cluster_barrier();
  if (active && collects) {
    add_shares(values, 1, split_k, [=](int split, int i) {
      return load_cluster(cluster_address(place, split) + i * threads * 16);
    });
  }
  cluster_barrier();  // shared memory must outlive the reads of the collecting block
  return collects;
}

// Sums `vectors` float4 per active thread over the splits. Returns true in the one block that then
// holds the sums; the others are done. `shared` is free for use: threads * vectors * 16 bytes with
// clusters, else 1.
template <int threads, int vectors>
__device__ __forceinline__ bool reduce_splits(float4 (&values)[vectors], bool active, int split_k,
                                              const split_k_workspace& workspace, void* shared) {
  if (workspace.counters == nullptr) {
    return reduce_through_cluster<threads>(values, active, split_k, shared);
  }
  return reduce_through_workspace<threads>(values, active, split_k, workspace,
                                           static_cast<bool*>(shared));
}

}  // namespace fftune
