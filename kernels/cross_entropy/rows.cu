// The loss of rows of logits, and its gradient: cross_entropy.hpp has the formulas.
//
// items and dloss may be null: gradients are not divided, and 1 is their factor. dloss has an
// element every `dloss_stride` rows, 1 or 0. logprobs and entropies may be null.
//
// A block, or a cluster of blocks, has one row. Each thread loads `held` vectors of it into
// registers at once, and row and gradient move through memory once each. With held = 0, for rows
// that are too long, a thread reads its vectors for the sums and again for the gradient.
//
// The sums are relative to the largest logit so far of each thread; one reduction joins them. Every
// thread has read the label's logit before that reduction, and reads only elements after it that it
// alone writes, so dlogits may be the logits.
//
// Powers are of two: z' = z·log2(e). The sums have a fixed order.
//
// Grid: rows * cluster. Block: `threads`. Cluster: `cluster`.
#include "common/async.cuh"
#include "common/rows.cuh"
#include "common/vectors.cuh"

namespace fftune {

// The results of a kernel.
struct cross_entropy_form {
  bool loss = false;      // loss and lse of each row; else lse is read
  bool gradient = false;  // dlogits
  bool smooths = false;
  bool weighs = false;  // class weights
  bool caps = false;
  bool entropy = false;
};

constexpr float log2_of_e = 1.44269504088896341f;
constexpr float log_of_2 = 0.693147180559945309f;

// Sums over a row, of powers relative to `most`. Only results that the form needs are computed.
template <cross_entropy_form form>
struct cross_entropy_sums {
  float most, powers;
  float excess;             // of power·(z' - most)
  float weighted, weights;  // of w·z', and of w

  static __device__ __forceinline__ cross_entropy_sums nothing() {
    return {lowest_score(), 0.0f, 0.0f, 0.0f, 0.0f};
  }
  // Makes sums relative to `reference`, which is not less than `most`.
  __device__ __forceinline__ void move(float reference) {
    if (most == reference) return;
    const float factor = softmax_sum::factor(most, reference);
    if constexpr (form.entropy) {
      if (most != lowest_score()) excess = (excess + powers * (most - reference)) * factor;
    }
    powers *= factor;
    most = reference;
  }
  static __device__ __forceinline__ cross_entropy_sums join(cross_entropy_sums a,
                                                            cross_entropy_sums b) {
    const float most = fmaxf(a.most, b.most);
    a.move(most);
    b.move(most);
    return {most, a.powers + b.powers, a.excess + b.excess, a.weighted + b.weighted,
            a.weights + b.weights};
  }
  static __device__ __forceinline__ cross_entropy_sums shuffle(const cross_entropy_sums& value,
                                                               int distance) {
    cross_entropy_sums other = value;
    other.most = __shfl_xor_sync(~0u, value.most, distance);
    other.powers = __shfl_xor_sync(~0u, value.powers, distance);
    if constexpr (form.entropy) other.excess = __shfl_xor_sync(~0u, value.excess, distance);
    if constexpr (form.smooths) other.weighted = __shfl_xor_sync(~0u, value.weighted, distance);
    if constexpr (form.weighs) other.weights = __shfl_xor_sync(~0u, value.weights, distance);
    return other;
  }
  // NaN makes the sum of powers NaN: it is above no number, and its power is NaN.
  __device__ __forceinline__ void add(float z) {
    const float distance = z - most;
    const float power = power_of_two(distance);
    powers += power;
    if constexpr (form.entropy) excess += power == 0.0f ? 0.0f : power * distance;
  }
};

template <bool caps>
__device__ __forceinline__ float capped_logit(float logit, float softcap) {
  return caps ? softcap * tanhf(logit / softcap) : logit;
}

// Sums of the blocks of a cluster, from those of each. Every thread calls it once, and then
// cluster_wait() before it exits: until then others read this block's shared memory.
template <class Value, int cluster>
struct cluster_reduction {
  static constexpr int quads = (sizeof(Value) + 15) / 16;
  union memory {
    float4 quad[quads];
    Value value;
  };

  static __device__ __forceinline__ Value apply(const Value& own, memory& shared) {
    if (threadIdx.x == 0) shared.value = own;
    cluster_barrier();
    const u32 address = shared_address(&shared);
    Value all;
#pragma unroll
    for (u32 rank = 0; rank < cluster; ++rank) {
      memory other;
#pragma unroll
      for (u32 i = 0; i < quads; ++i)
        other.quad[i] = load_cluster(cluster_address(address + 16 * i, rank));
      all = rank == 0 ? other.value : Value::join(all, other.value);
    }
    cluster_arrive();
    return all;
  }
};

template <class T, cross_entropy_form form, int count, int threads, int held, int cluster>
__global__ void __launch_bounds__(threads, 1024 / threads)
    cross_entropy_rows(const T* logits_of_rows, const i64* labels, const float* class_weights,
                       const float* items, const float* dloss, float* lses, float* losses,
                       float* logprobs, float* entropies, T* dlogits, i64 ignored_label, int vocab,
                       int dloss_stride, float smoothing, float z_loss, float softcap) {
  using sums_of = cross_entropy_sums<form>;
  using reduction = row_reduction<sums_of, threads, 1, 1>;
  using of_cluster = cluster_reduction<sums_of, cluster>;
  __shared__ typename reduction::memory shared;
  __shared__ typename of_cluster::memory shared_of_cluster;
  const i64 row = blockIdx.x / cluster;
  const T* const logits = logits_of_rows + row * vocab;
  const int rank = cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int first = (rank * threads + static_cast<int>(threadIdx.x)) * count;
  constexpr int step = cluster * threads * count;
  // Vectors in flight; with a soft cap the arithmetic takes the registers.
  constexpr int unrolled = held > 0 ? held : form.caps ? 1 : count >= 4 ? 2 : 4;
  const u64 policy = l2_eviction_policy<false>();
  const u32 zero = static_cast<u32>(vocab) >> 31;  // 0, unknown to the compiler
  wait_and_launch_dependents();

  aligned_vector<T, count> vectors[held > 0 ? held : 1];
#pragma unroll
  for (int i = 0; i < held; ++i)
    vectors[i] = load_once<T, count>(logits + first + i * step, first + i * step < vocab, policy);

  const i64 label = labels[row];
  const bool ignored = label == ignored_label;
  const bool is_id = label >= 0 && label < vocab;
  if (ignored || !is_id) {
    const float value = ignored ? 0.0f : __uint_as_float(0x7fc00000u);
    if (form.loss && rank == 0 && threadIdx.x == 0) {
      losses[row] = lses[row] = value;
      if (logprobs != nullptr) logprobs[row] = value;
      if (entropies != nullptr) entropies[row] = value;
    }
    if constexpr (form.gradient) {
      float values[count];
#pragma unroll
      for (int e = 0; e < count; ++e) values[e] = value;
      T* const gradient = dlogits + row * vocab;
      for (int column = first; column < vocab; column += step)
        store_once(gradient + column, from_floats<T>(values), policy);
    }
    return;
  }
  const float label_logit = capped_logit<form.caps>(to_float(logits[label]), softcap);
  const float label_weight = form.weighs ? class_weights[label] : 1.0f;

  sums_of own = sums_of::nothing();
  if constexpr (form.loss || (form.smooths && form.weighs)) {
#pragma unroll unrolled
    for (int i = 0; held == 0 || i < held; ++i) {
      const int column = first + i * step;
      if (column >= vocab) break;
      if constexpr (held == 0) vectors[0] = load_once<T, count>(logits + column, true, policy);
      float z[count];
      to_floats(vectors[held > 0 ? i : 0], z);
      float most = own.most;
#pragma unroll
      for (int e = 0; e < count; ++e) {
        z[e] = __fmul_rn(capped_logit<form.caps>(z[e], softcap), log2_of_e);
        most = fmaxf(most, z[e]);
        if constexpr (form.smooths) {
          const float weight = form.weighs ? class_weights[column + e] : 1.0f;
          own.weighted += weight * z[e];
          if constexpr (form.weighs) own.weights += weight;
        }
      }
      own.move(most);
      // A row of -infinity alone has no powers, and no differences.
      if (most != lowest_score()) {
#pragma unroll
        for (int e = 0; e < count; ++e) own.add(z[e]);
      } else {
#pragma unroll
        for (int e = 0; e < count; ++e) own.powers += z[e] == lowest_score() ? 0.0f : z[e];
      }
    }
  }
  sums_of all = reduction::apply(own, shared);
  if constexpr (cluster > 1) all = of_cluster::apply(all, shared_of_cluster);
  float lse, lse_in_twos;
  if constexpr (form.loss) {
    const float distance = log2f(all.powers);  // of lse from the largest logit
    lse_in_twos = all.most + distance;
    lse = lse_in_twos * log_of_2;
    if (rank == 0 && threadIdx.x == 0) {
      // By its distance from the largest logit, which loses nothing where it is that one.
      const float logprob = ((__fmul_rn(label_logit, log2_of_e) - all.most) - distance) * log_of_2;
      float loss = -(1.0f - smoothing) * label_weight * logprob;
      if (z_loss > 0) loss += z_loss * lse * lse;
      if constexpr (form.smooths) {
        const float weights = form.weighs ? all.weights : static_cast<float>(vocab);
        loss += smoothing / static_cast<float>(vocab) * (weights * lse - all.weighted * log_of_2);
      }
      losses[row] = loss;
      lses[row] = lse;
      if (logprobs != nullptr) logprobs[row] = logprob;
      if constexpr (form.entropy) {
        entropies[row] = (distance - all.excess / all.powers) * log_of_2;
      }
    }
  } else {
    lse = lses[row];
    lse_in_twos = lse * log2_of_e;
  }
  if constexpr (form.gradient) {
    float upstream = dloss == nullptr ? 1.0f : dloss[row * dloss_stride];
    if (items != nullptr) upstream /= items[0];
    const float share = smoothing / static_cast<float>(vocab);
    const float of_label = (1.0f - smoothing) * label_weight;
    float of_power = of_label;
    if (z_loss > 0) of_power += 2.0f * z_loss * lse;
    if constexpr (form.smooths)
      of_power += share * (form.weighs ? all.weights : static_cast<float>(vocab));
    T* const gradient = dlogits + row * vocab;
#pragma unroll unrolled
    for (int i = 0; held == 0 || i < held; ++i) {
      const int column = first + i * step;
      if (column >= vocab) break;
      if constexpr (held == 0) vectors[0] = load_once<T, count>(logits + column, true, policy);
      float z[count];
      to_floats_again(vectors[held > 0 ? i : 0], zero, z);
#pragma unroll
      for (int e = 0; e < count; ++e) {
        const float capped = capped_logit<form.caps>(z[e], softcap);
        float value = of_power * power_of_two(fmaf(capped, log2_of_e, -lse_in_twos));
        if constexpr (form.smooths)
          value -= share * (form.weighs ? class_weights[column + e] : 1.0f);
        if (column + e == label) value -= of_label;
        if constexpr (form.caps) {
          const float part = capped / softcap;
          value *= 1.0f - part * part;
        }
        z[e] = upstream * value;
      }
      store_once(gradient + column, from_floats<T>(z), policy);
    }
  }
  if constexpr (cluster > 1) cluster_wait();
}

// total = the sum of all rows' losses, divided by items[0] where there is that. Grid: 1. Block:
// 1024.
__global__ void __launch_bounds__(1024)
    cross_entropy_total(const float* losses, const float* items, float* total, i64 rows) {
  using reduction = row_reduction<plain_sum, 1024, 1, 1>;
  __shared__ reduction::memory shared;
  wait_and_launch_dependents();
  plain_sum own = plain_sum::nothing();
  for (i64 row = threadIdx.x; row < rows; row += 1024) own.sum += losses[row];
  const float sum = reduction::apply(own, shared).sum;
  if (threadIdx.x == 0) total[0] = items == nullptr ? sum : sum / items[0];
}

}  // namespace fftune
