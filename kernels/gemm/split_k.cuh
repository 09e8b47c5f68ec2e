// Deterministic split-K in one launch. Each of the `split_k` blocks of a tile writes its fp32 partial sums to the
// workspace; the last to arrive adds all of them up in the order of the splits, its own included, and so the result
// does not depend on which was last. No float atomics; one integer counter per tile says who is last.
//
// The counters must be zero before the first launch. atom.inc wraps at split_k - 1, so they are zero again when the
// launch ends, and a captured graph can be replayed. Two launches that may overlap need separate workspaces.
#pragma once

#include "common/vector.cuh"

namespace fftune {

struct split_k_workspace {
    u32* counters;    // [tiles]
    float* partials;  // [tiles, split_k, values of a tile], 16-byte aligned
};

struct split_k_place {
    i64 tile;
    int split, split_k;
};

// Counts this block in and tells every thread whether it is the last of its tile. All threads of the block call it
// after their stores to the workspace; in the last block those of every other block are visible afterwards.
__device__ __forceinline__ bool arrive_last(u32* counter, int split_k, bool* shared_flag) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *shared_flag = atomicInc(counter, static_cast<u32>(split_k - 1)) == static_cast<u32>(split_k - 1);
    }
    __syncthreads();
    const bool last = *shared_flag;
    if (last) {
        __threadfence();
    }
    return last;
}

// Sums `vectors` float4 per thread over the splits of a tile. Returns true in the last block, where `values` then
// holds the sums; other blocks are done. A thread's values are `threads` float4 apart, so that a warp stores and
// loads 512 contiguous bytes.
template <int threads, int vectors>
__device__ __forceinline__ bool reduce_splits(float4 (&values)[vectors], const split_k_workspace& workspace,
                                              const split_k_place& place, bool* shared_flag) {
    constexpr int split_values = threads * vectors * 4;
    float* const tile = workspace.partials + place.tile * place.split_k * split_values + threadIdx.x * 4;
    float* const mine = tile + static_cast<i64>(place.split) * split_values;
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
        store_coherent(mine + i * threads * 4, values[i]);
    }
    if (!arrive_last(workspace.counters + place.tile, place.split_k, shared_flag)) {
        return false;
    }
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
        values[i] = load_coherent(tile + i * threads * 4);
    }
    for (int split = 1; split < place.split_k; ++split) {
        const float* const other = tile + static_cast<i64>(split) * split_values;
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
            const float4 partial = load_coherent(other + i * threads * 4);
            values[i].x += partial.x;
            values[i].y += partial.y;
            values[i].z += partial.z;
            values[i].w += partial.w;
        }
    }
    return true;
}

}  // namespace fftune
