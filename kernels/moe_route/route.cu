// The router: a warp has a token, and its lanes the logits of experts lane, lane + 32 and so on, in
// registers. The choices are found one by one: each lane offers its best expert that is left, and
// five shuffles find the best of all. The first of equal experts wins. NaN is above every number,
// as in PyTorch's topk: values are compared as integers of the same order, rank_of().
//
// Choices are by the logits themselves where no bias and no group compares sums of scores: softmax
// and sigmoid keep their order, and the choice does not depend on how either is rounded.
//
// Grid: ceil(tokens / warps of a block). Block: 128 threads.
#include "common/async.cuh"
#include "common/numerics.cuh"

namespace fftune {

enum class router_score { softmax_of_all, softmax_of_chosen, sigmoid };

struct router_form {
  int experts, choices;
  int groups, top_groups;
  router_score score;
  bool sums_two, bias, renormalises;
  bool adds_millionth = false;

  constexpr int of_lane() const { return (experts + 31) / 32; }
  // To the sum of the chosen scores: of sigmoids, which may all underflow.
  constexpr float added() const {
    return adds_millionth ? 1e-6f : score == router_score::sigmoid ? 1e-20f : 0;
  }
  constexpr bool chooses_by_logits() const { return !bias && !(groups > 1 && sums_two); }
};

namespace {

// Below every score that takes part: -infinity.
__device__ __forceinline__ float nothing() {
  return __int_as_float(0xff800000);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0u, value, distance);
  }
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
  }
  return value;
}

// The larger one; NaN if either is.
__device__ __forceinline__ float larger_or_nan(float one, float other) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(one), "f"(other));
  return result;
}

// An integer in the order of floats, NaN above all: the bits of a magnitude are in that order, and
// those of a negative number in the opposite one.
__device__ __forceinline__ int rank_of(float value) {
  const int bits = __float_as_int(value + 0.0f);  // both zeros are +0
  return value != value ? 0x7fffffff : bits < 0 ? bits ^ 0x7fffffff : bits;
}
constexpr int taken = -0x7fffffff - 1;  // below the rank of -infinity

// The rank of a value and whose it is: the larger one is better, and of equal ones the first.
struct candidate {
  int rank;
  int index;

  __device__ __forceinline__ bool better_than(const candidate& other) const {
    return rank > other.rank || (rank == other.rank && index < other.index);
  }
};
__device__ __forceinline__ candidate warp_best(candidate own) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const candidate other{__shfl_xor_sync(~0u, own.rank, distance),
                          __shfl_xor_sync(~0u, own.index, distance)};
    if (other.better_than(own)) own = other;
  }
  return own;
}

template <router_form form>
struct router {
  static constexpr int of_lane = form.of_lane(), experts = form.experts;
  using values = float[of_lane];
  using ranks = int[of_lane];

  static __device__ __forceinline__ int expert(int i) { return i * 32 + threadIdx.x % 32; }

  template <class T>
  static __device__ __forceinline__ void load(values& logits, const T* row) {
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
      logits[i] = expert(i) < experts ? to_float(row[expert(i)]) : nothing();
    }
  }

  // The scores; of softmax_of_chosen the logits.
  static __device__ __forceinline__ void score(values& scores, const values& logits) {
    float largest = nothing(), sum = 0;
    if constexpr (form.score == router_score::softmax_of_all) {
#pragma unroll
      for (int i = 0; i < of_lane; ++i) largest = fmaxf(largest, logits[i]);
      largest = warp_max(largest);
    }
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
      scores[i] = logits[i];
      if (form.score == router_score::sigmoid) scores[i] = 1 / (1 + expf(-logits[i]));
      if (form.score == router_score::softmax_of_all) {
        scores[i] = expert(i) < experts ? expf(logits[i] - largest) : 0;
        sum += scores[i];
      }
    }
    if constexpr (form.score == router_score::softmax_of_all) {
      sum = warp_sum(sum);
#pragma unroll
      for (int i = 0; i < of_lane; ++i) scores[i] /= sum;
    }
  }

  // The best that is left in `by`, which then is not.
  static __device__ __forceinline__ candidate take(ranks& by) {
    candidate own{taken, 1 << 30};
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
      const candidate other{by[i], expert(i)};
      if (other.better_than(own)) own = other;
    }
    own = warp_best(own);
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
      if (expert(i) == own.index) by[i] = taken;
    }
    return own;
  }
  // The value of an expert, from the lane that has it.
  static __device__ __forceinline__ float value_of(const values& all, int index) {
    float own = 0;
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
      if (i == index / 32) own = all[i];
    }
    return __shfl_sync(~0u, own, index % 32);
  }

  // Leaves of `by` what the best groups have. Lane g has the score of group g.
  static __device__ __forceinline__ void keep_groups(values& by) {
    constexpr int size = experts / form.groups;
    const int lane = threadIdx.x % 32;
    candidate own{taken, lane < form.groups ? lane : 1 << 30};
#pragma unroll 1
    for (int group = 0; group < form.groups; ++group) {
      float first = nothing(), second = nothing();  // the best two of this lane's experts
#pragma unroll
      for (int i = 0; i < of_lane; ++i) {
        if (expert(i) / size == group && expert(i) < experts) {
          second = fmaxf(second, fminf(first, by[i]));
          first = larger_or_nan(first, by[i]);
        }
      }
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        const float other_first = __shfl_xor_sync(~0u, first, distance);
        const float other_second = __shfl_xor_sync(~0u, second, distance);
        second = fmaxf(fminf(first, other_first), fmaxf(second, other_second));
        first = larger_or_nan(first, other_first);
      }
      if (lane == group) own.rank = rank_of(form.sums_two && size > 1 ? first + second : first);
    }
    u32 kept = 0;
#pragma unroll 1
    for (int i = 0; i < form.top_groups; ++i) {
      const candidate best = warp_best(own);
      kept |= 1u << best.index;
      if (lane == best.index) own = {taken, 1 << 30};
    }
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
      if (expert(i) < experts && (kept >> expert(i) / size & 1) == 0) by[i] = nothing();
    }
  }
};

}  // namespace

// logits [tokens, experts], bias [experts] or null -> ids, weights [tokens, choices].
template <class T, router_form form>
__global__ void __launch_bounds__(128) choose_experts(const T* logits, const float* bias, int* ids,
                                                      float* weights, float scale, i64 tokens) {
  using of = router<form>;
  const i64 token = static_cast<i64>(blockIdx.x) * 4 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  wait_and_launch_dependents();
  if (token >= tokens) return;
  typename of::values own, scores, by;
  of::load(own, logits + token * form.experts);
  of::score(scores, own);
#pragma unroll
  for (int i = 0; i < of::of_lane; ++i) {
    by[i] = form.chooses_by_logits() ? own[i] : scores[i];
    if (form.bias && of::expert(i) < form.experts) by[i] += bias[of::expert(i)];
    if (of::expert(i) >= form.experts) by[i] = nothing();
  }
  if constexpr (form.groups > 1) of::keep_groups(by);
  typename of::ranks rank;
#pragma unroll
  for (int i = 0; i < of::of_lane; ++i) rank[i] = rank_of(by[i]);
  // Lane i has choice i.
  int id = 0;
  float weight = 0;
#pragma unroll 1
  for (int choice = 0; choice < form.choices; ++choice) {
    const candidate best = of::take(rank);
    const float value = of::value_of(scores, best.index);
    if (lane == choice) {
      id = best.index;
      weight = value;
    }
  }
  if constexpr (form.score == router_score::softmax_of_chosen) {
    const float largest = warp_max(lane < form.choices ? weight : nothing());
    weight = lane < form.choices ? expf(weight - largest) : 0;
  }
  if constexpr (form.renormalises || form.score == router_score::softmax_of_chosen) {
    weight /= warp_sum(weight) + form.added();
  }
  if (lane < form.choices) {
    ids[token * form.choices + lane] = id;
    weights[token * form.choices + lane] = weight * scale;
  }
}

// d_weights and ids [tokens, choices], logits [tokens, experts] -> d_logits [tokens, experts].
template <class T, router_form form>
__global__ void __launch_bounds__(128)
    choose_experts_gradient(const float* d_weights, const T* logits, const int* ids, T* d_logits,
                            float scale, i64 tokens) {
  using of = router<form>;
  const i64 token = static_cast<i64>(blockIdx.x) * 4 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  wait_and_launch_dependents();
  if (token >= tokens) return;
  typename of::values own, scores;
  of::load(own, logits + token * form.experts);
  of::score(scores, own);
  // Lane i has choice i.
  const bool has = lane < form.choices;
  const int id = has ? ids[token * form.choices + lane] : 0;
  const float d_weight = has ? d_weights[token * form.choices + lane] : 0;
  float score = 0;
#pragma unroll 1
  for (int choice = 0; choice < form.choices; ++choice) {
    const int index = __shfl_sync(~0u, id, choice);
    const float value = of::value_of(scores, index);
    if (lane == choice) score = value;
  }
  float gradient = scale * d_weight;  // of the choice's score
  if constexpr (form.score == router_score::softmax_of_chosen) {
    const float largest = warp_max(has ? score : nothing());
    const float exponential = has ? expf(score - largest) : 0;
    const float share = exponential / warp_sum(exponential);
    gradient = scale * share * (d_weight - warp_sum(d_weight * share));
  } else if constexpr (form.renormalises) {
    const float sum = warp_sum(score) + form.added(), share = score / sum;
    gradient = scale * (d_weight - warp_sum(d_weight * share)) / sum;
  }
  if constexpr (form.score == router_score::sigmoid) gradient *= score * (1 - score);
  float inner = 0;
  if constexpr (form.score == router_score::softmax_of_all) {
    gradient *= score;
    inner = warp_sum(gradient);
  }
#pragma unroll
  for (int i = 0; i < of::of_lane; ++i) {
    own[i] = form.score == router_score::softmax_of_all ? -scores[i] * inner : 0;
  }
#pragma unroll 1
  for (int choice = 0; choice < form.choices; ++choice) {
    const int index = __shfl_sync(~0u, id, choice);
    const float value = __shfl_sync(~0u, gradient, choice);
#pragma unroll
    for (int i = 0; i < of::of_lane; ++i) {
      if (of::expert(i) == index) own[i] += value;
    }
  }
#pragma unroll
  for (int i = 0; i < of::of_lane; ++i) {
    if (of::expert(i) < form.experts) {
      d_logits[token * form.experts + of::expert(i)] = from_float<T>(own[i]);
    }
  }
}

}  // namespace fftune
