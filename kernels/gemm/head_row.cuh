// Epilogue arithmetic of the features of one head of one token in the epilogue qkv (qkv_form in
// gemm/form.cuh). A warp finds the features in shared memory, in float32: all of them, or those of
// its block.
#pragma once

#include "common/numerics.cuh"
#include "common/vectors.cuh"
#include "gemm/form.cuh"

namespace fftune {

// The cosine and sine of pair `pair` of `pairs` in row `row`.
template <head_rotation rotation, class Real>
__device__ __forceinline__ float2 turn_of(const head_angles& angles, const float* frequencies,
                                          i64 row, int pair, int pairs) {
  const int position = angles.positions[row];
  float angle;
  if (angles.table != nullptr) {
    const int last = angles.table_rows - 1;
    const int line = position < 0 ? 0 : position > last ? last : position;
    const int column = rotation == head_rotation::interleaved ? 2 * pair : pair;
    angle = angles.table[static_cast<i64>(line) * (2 * pairs) + column];
  } else {
    angle = static_cast<float>(position) * frequencies[pair];
  }
  Real sine, cosine;
  sine_and_cosine(angle, sine, cosine);
  return {static_cast<float>(cosine * angles.scale), static_cast<float>(sine * angles.scale)};
}

// `count` is the number of features that the warp finds. Number i is feature `feature_of(i)` of its
// head; the other one of a rotated pair is `distance` after or before it.
template <gemm_form form, int count, int distance>
struct head_row {
  using T = element_type<form.c>;
  static constexpr qkv_form heads = form.qkv;

  float* features;
  int lane = threadIdx.x % 32;

  // Adds the head's bias. The sum of the squares, in every lane.
  template <class FeatureOf>
  __device__ __forceinline__ float add_bias(const T* bias, const FeatureOf& feature_of) const {
    float sum = 0;
    for (int i = lane; i < count; i += 32) {
      if constexpr (heads.bias) features[i] += to_float(bias[feature_of(i)]);
      sum += features[i] * features[i];
    }
    if constexpr (heads.normalises) {
#pragma unroll
      for (int other = 1; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
    }
    __syncwarp();
    return sum;
  }

  // `squares`: their sum over all features of the head.
  template <class FeatureOf>
  __device__ __forceinline__ void normalise(const T* norm, float squares, float epsilon,
                                            float offset, const FeatureOf& feature_of) const {
    const float factor = rsqrtf(squares / heads.dim + epsilon);
    for (int i = lane; i < count; i += 32) {
      features[i] *= factor * (offset + to_float(norm[feature_of(i)]));
    }
    __syncwarp();
  }

  // `turn`: the cosine and sine of the pair that feature number i belongs to. Those of v are not
  // rotated.
  template <class FeatureOf, class Turn>
  __device__ __forceinline__ void store(T* to, bool is_v, const FeatureOf& feature_of,
                                        const Turn& turn) const {
    for (int i = lane; i < count; i += 32) {
      const int feature = feature_of(i);
      float value = features[i];
      if constexpr (heads.rotates()) {
        if (!is_v && feature < heads.rotary) {
          constexpr bool halves = heads.rotation == head_rotation::halves;
          const bool is_first = halves ? feature < heads.rotary / 2 : feature % 2 == 0;
          const float partner = features[is_first ? i + distance : i - distance];
          const float2 by = turn(i);
          value = value * by.x + (is_first ? -partner : partner) * by.y;
        }
      }
      to[feature] = from_float<T>(value);
    }
  }
};

// The row of the caches that a token's k and v go to: negative where its slot is none of theirs.
template <qkv_form form>
__device__ __forceinline__ i64 slot_of(const qkv_params& qkv, i64 token) {
  if constexpr (form.wide_slots) {
    const i64 slot = static_cast<const i64*>(qkv.slots)[token];
    return static_cast<u64>(slot) < static_cast<u32>(qkv.cache_rows) ? slot : -1;
  } else {
    const int slot = static_cast<const int*>(qkv.slots)[token];
    return static_cast<u32>(slot) < static_cast<u32>(qkv.cache_rows) ? slot : -1;
  }
}

// The row of its part that a token's heads go to: negative where it has none.
template <gemm_form form>
__device__ __forceinline__ i64 row_of_part(const qkv_params& qkv, int part, i64 token) {
  if constexpr (form.qkv.caches) {
    if (part > 0) return slot_of<form.qkv>(qkv, token);
  }
  return token;
}

// The place of a column of a part in a row of its tensor. Heads of the caches may be apart.
template <gemm_form form>
__device__ __forceinline__ i64 place_in_part(const qkv_params& qkv, int part, i64 row, int column) {
  if constexpr (form.qkv.caches) {
    constexpr int dim = form.qkv.dim;
    if (part > 0) {
      return (row * (qkv.kv_columns / dim) + column / dim) * qkv.cache_head + column % dim;
    }
  }
  return row * qkv.columns(part) + column;
}

}  // namespace fftune
