// The named barriers of the sm_90a GEMM kernel (bar.sync, bar.arrive). 0 is __syncthreads'.
#pragma once

#include "common/barrier.cuh"

namespace fftune {

enum class named_barrier {
  epilogue = 1,      // + MMA warpgroup: its 128 threads, around each subtile
  mma_order = 4,     // + MMA warpgroup, ping-pong: order of the main loops
  source_order = 6,  // + MMA warpgroup, ping-pong: order of the shared epilogue stages
  zero_fill = 8,     // cooperative grouped reduction: the K tail of a stage is zero
  groups = 9,        // the groups are in shared memory: all arrive, the index warp waits
};

__device__ __forceinline__ void sync(named_barrier barrier, int threads, int offset = 0) {
  named_barrier_sync(static_cast<int>(barrier) + offset, threads);
}
__device__ __forceinline__ void arrive(named_barrier barrier, int threads, int offset = 0) {
  named_barrier_arrive(static_cast<int>(barrier) + offset, threads);
}

}  // namespace fftune
