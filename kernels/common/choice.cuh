// The best id of a row and the sum of its probabilities, in parts: of lanes, warps and blocks. A
// part is combined with others in a fixed order, so that sums have the same bits in every run.
#pragma once

#include "common/numerics.cuh"
#include "common/sampling.cuh"

namespace fftune {

// A float whose operations each round by themselves: no multiply-add.
struct rounded {
  float value;

  __device__ __forceinline__ constexpr explicit rounded(float from) : value(from) {}
};
__device__ __forceinline__ rounded operator+(rounded a, rounded b) {
  return rounded(__fadd_rn(a.value, b.value));
}
__device__ __forceinline__ rounded operator-(rounded a, rounded b) {
  return rounded(__fsub_rn(a.value, b.value));
}
__device__ __forceinline__ rounded operator*(rounded a, rounded b) {
  return rounded(__fmul_rn(a.value, b.value));
}
__device__ __forceinline__ rounded operator/(rounded a, rounded b) {
  return rounded(__fdiv_rn(a.value, b.value));
}
__device__ __forceinline__ float float_of(rounded a) {
  return a.value;
}

// Compile-time properties of a choice.
struct choice_form {
  bool draws = false;
  bool sums = false;  // the log-probability is asked for
};

struct row_draws {
  const float* temperature;
  const i64* seeds;
  const int* steps;
};

// A part of a row in memory.
struct alignas(16) choice_part {
  int rank, id;
  float logit;
  float largest, sum;
  int unused[3];
};

template <choice_form form>
struct row_choice {
  int rank = -0x7fffffff - 1, id = 0x7fffffff;  // below every score
  float logit = 0;
  float largest = __int_as_float(0xff800000), sum = 0;  // of exp(logit - largest)

  __device__ __forceinline__ void take(int other_rank, int other_id, float other_logit) {
    const bool better = other_rank > rank || (other_rank == rank && other_id < id);
    rank = better ? other_rank : rank;
    id = better ? other_id : id;
    logit = better ? other_logit : logit;
  }
  __device__ __forceinline__ void add_sum(float other_largest, float other_sum) {
    const float high = fmaxf(largest, other_largest);
    // Without any number above -infinity there is no sum; NaN stays in it.
    const float own = largest == high ? 1.0f : expf(largest - high);
    const float others = other_largest == high ? 1.0f : expf(other_largest - high);
    sum = sum * own + other_sum * others;
    largest = high;
  }
  // exp(-infinity) is 0, and NaN makes the sum NaN.
  __device__ __forceinline__ void add_sum_of(float value) {
    if (value > largest) {
      sum = sum * expf(largest - value) + 1.0f;
      largest = value;
    } else if (value != __int_as_float(0xff800000)) {
      sum += expf(value - largest);
    }
  }
  __device__ __forceinline__ void add(const row_choice& other) {
    take(other.rank, other.id, other.logit);
    if constexpr (form.sums) add_sum(other.largest, other.sum);
  }
  // Adds what the lane `distance` away has; both then have the same.
  __device__ __forceinline__ void add_lane(int distance) {
    row_choice other;
    other.rank = __shfl_xor_sync(~0u, rank, distance);
    other.id = __shfl_xor_sync(~0u, id, distance);
    other.logit = __shfl_xor_sync(~0u, logit, distance);
    if constexpr (form.sums) {
      other.largest = __shfl_xor_sync(~0u, largest, distance);
      other.sum = __shfl_xor_sync(~0u, sum, distance);
    }
    add(other);
  }
  __device__ __forceinline__ void add_warp() {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) add_lane(distance);
  }
  // In thread 0: that of all threads of the block. `shared`: a part for each warp.
  __device__ __forceinline__ void add_block(choice_part* shared) {
    add_warp();
    if (threadIdx.x % 32 == 0) store(shared + threadIdx.x / 32);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    row_choice all;
    if (threadIdx.x < blockDim.x / 32) all.load(shared[threadIdx.x]);
    all.add_warp();
    *this = all;
  }

  __device__ __forceinline__ void store(choice_part* to) const {
    *to = {rank, id, logit, largest, sum, {}};
  }
  __device__ __forceinline__ void load(const choice_part& from) {
    rank = from.rank, id = from.id, logit = from.logit;
    largest = from.largest, sum = from.sum;
  }
  __device__ __forceinline__ void finish(i64 row, int* ids, float* logits, float* logprobs) const {
    ids[row] = id;
    logits[row] = logit;
    if constexpr (form.sums) logprobs[row] = logit - (largest + logf(sum));
  }
};

// From logits to scores, of a row.
template <choice_form form>
struct row_scores {
  float softcap = 0;
  float reciprocal = -1;  // of the temperature; -1: the best id
  score_factors by{};
  i64 seed = 0;
  int step = 0;

  __device__ __forceinline__ void load(const row_draws& draws, i64 row) {
    if constexpr (form.draws) {
      const float temperature = draws.temperature[row];
      reciprocal = temperature > 0 ? reciprocal_temperature<rounded>(temperature) : -1.0f;
      by = factors_of_scores<rounded>(temperature);
      seed = draws.seeds[row];
      step = draws.steps[row];
    }
  }
  __device__ __forceinline__ bool draws() const { return form.draws && reciprocal >= 0; }
  __device__ __forceinline__ float cap(float logit) const {
    return softcap > 0 ? capped<rounded>(logit, softcap) : logit;
  }
  __device__ __forceinline__ random_words words(int quad) const {
    if (!draws()) return {};
    return noise_words(seed, step, quad);
  }
  // The score of a capped logit.
  __device__ __forceinline__ float score(float logit, u32 word) const {
    return draws() ? score_of<rounded>(logit, by, word) : logit;
  }
};

}  // namespace fftune
