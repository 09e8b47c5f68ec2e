// A pipeline of stages in shared memory, from producer warps that load them to MMA warpgroups.
#pragma once

#include "common/tma.cuh"

namespace fftune {

// A state of the pipeline: the stage that is next, and the phase of its barriers. A stage's full
// barrier completes when its bytes and arrivals are there, its empty one when all readers are done.
template <int stages, int stage_bytes>
struct pipeline {
  u32 buffers, full, empty;
  u32 index = 0, phase = 0;

  __device__ __forceinline__ u32 buffer() const { return buffers + index * stage_bytes; }
  __device__ __forceinline__ u32 full_barrier() const { return full + index * 8; }
  __device__ __forceinline__ u32 empty_barrier() const { return empty + index * 8; }
  __device__ __forceinline__ void advance() {
    if (++index == stages) {
      index = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void advance(u32 count) {
    phase ^= (index + count) / stages & 1;
    index = (index + count) % stages;
  }
  __device__ __forceinline__ void retreat(int count) {
    for (int i = 0; i < count; ++i) {
      phase ^= index == 0 ? 1 : 0;
      index = index == 0 ? stages - 1 : index - 1;
    }
  }
  // The first pass over the stages finds them empty.
  __device__ __forceinline__ void wait_empty() const { barrier_wait(empty_barrier(), phase ^ 1); }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full_barrier(), phase); }

  // Producers in a cluster: until every stage is released, as a CTA may not exit while peers still
  // multicast into it or signal its barriers.
  __device__ __forceinline__ void drain() {
    for (int stage = 0; stage < stages; ++stage, advance()) wait_empty();
  }
};

}  // namespace fftune
