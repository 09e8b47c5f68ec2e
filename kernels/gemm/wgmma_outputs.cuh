// Where the epilogue of the wgmma engine stores, what it adds, and the buffers between.
#pragma once

#include "common/tma.cuh"

namespace fftune {

// The tensor maps are those of the outputs' boxes, the residual's too.
struct wgmma_outputs {
  const tensor_map& c;
  const tensor_map& first_sums;  // unused with one output
  const tensor_map& second_sums;
  const tensor_map& residual;  // [m, n]; unused where nothing is added
  const void* bias;            // [n]
  const float* scale;          // of an output of fp8 beside which its sums are stored

  explicit __device__ __forceinline__ wgmma_outputs(const tensor_map& only)
      : wgmma_outputs(only, only, only, only, nullptr) {}
  __device__ __forceinline__ wgmma_outputs(const tensor_map& value, const tensor_map& first,
                                           const tensor_map& second, const tensor_map& more,
                                           const void* row, const float* unit = nullptr)
      : c(value), first_sums(first), second_sums(second), residual(more), bias(row), scale(unit) {}

  __device__ __forceinline__ const tensor_map& first() const { return c; }
  // What makes the first output an element, where that is not in its sums already.
  __device__ __forceinline__ float factor() const { return scale != nullptr ? 1 / *scale : 1; }
  template <int output>
  __device__ __forceinline__ const tensor_map& map() const {
    if constexpr (output == 0) {
      return c;
    } else if constexpr (output == 1) {
      return first_sums;
    } else {
      return second_sums;
    }
  }
};

// A consumer's ring of buffers. What is added to a box travels through the buffer that the box
// will take: the copy engine loads it there, and the buffer's barrier says when.
template <int count, int box_bytes>
struct wgmma_boxes {
  u32 buffers, barriers;
  u32 index = 0;
  u32 parities = 0;  // one bit a buffer

  // The place to use next.
  __device__ __forceinline__ u32 take() {
    const u32 place = index;
    index = index + 1 == count ? 0 : index + 1;
    return place;
  }
  __device__ __forceinline__ u32 buffer(u32 place) const { return buffers + place * box_bytes; }

  // One thread: starts to fill a buffer whose last store has been read.
  __device__ __forceinline__ void fetch(u32 place, const tensor_map& map, int feature,
                                        int token) const {
    barrier_arrive_expect(barriers + place * 8, box_bytes);
    tma_load(buffer(place), map, barriers + place * 8, feature, token, l2_policy::evict_first);
  }
  // All threads: waits until the buffer is filled.
  __device__ __forceinline__ void wait(u32 place) {
    barrier_wait(barriers + place * 8, parities >> place & 1);
    parities ^= 1u << place;
  }
};

}  // namespace fftune
