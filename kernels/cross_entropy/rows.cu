// The loss of rows of logits, and its gradient: cross_entropy.hpp has the formulas.
//
// items and dloss may be null: gradients are not divided, and 1 is their factor. dloss has an
// element every `dloss_stride` rows, 1 or 0. logprobs and entropies may be null.
//
// Two kernels. cross_entropy_rows: a block has one row; it reads the row for its sums and again for
// the gradient. cross_entropy_held, for both at once (sm_90): the blocks of a cluster hold a row in
// registers in between, so that it is read once; each block loads its part of the next row into
// shared memory meanwhile.
//
// `whole` is 0, or the ids of the vocabulary that the row has a slice of: a label that is none of
// the slice's ids belongs to another slice, and adds nothing here.
//
// Sums are relative to the largest logit so far of each thread; one reduction joins them. The
// label's logit is read before that reduction, and after it a thread reads only elements that it
// alone writes, so dlogits may be the logits.
//
// Powers are of two: z' = z·log2(e). The sums have a fixed order.
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

template <bool caps>
__device__ __forceinline__ float capped_logit(float logit, float softcap) {
  return caps ? softcap * tanhf(logit / softcap) : logit;
}

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
  // Adds the logits of a row from `column` on.
  template <int count>
  __device__ __forceinline__ void add(const float (&logits)[count], int column,
                                      const float* class_weights, float softcap) {
    float z[count];
    float largest = most;
#pragma unroll
    for (int e = 0; e < count; ++e) {
      z[e] = __fmul_rn(capped_logit<form.caps>(logits[e], softcap), log2_of_e);
      largest = fmaxf(largest, z[e]);
      if constexpr (form.smooths) {
        const float weight = form.weighs ? class_weights[column + e] : 1.0f;
        weighted += weight * z[e];
        if constexpr (form.weighs) weights += weight;
      }
    }
    move(largest);
    // A row of -infinity alone has no powers, and no differences.
    if (largest != lowest_score()) {
#pragma unroll
      for (int e = 0; e < count; ++e) add(z[e]);
    } else {
#pragma unroll
      for (int e = 0; e < count; ++e) powers += z[e] == lowest_score() ? 0.0f : z[e];
    }
  }

 private:
  // NaN makes the sum of powers NaN: it is above no number, and its power is NaN.
  __device__ __forceinline__ void add(float z) {
    const float distance = z - most;
    const float power = power_of_two(distance);
    powers += power;
    if constexpr (form.entropy) excess += power == 0.0f ? 0.0f : power * distance;
  }
};

// A row: its label, and by which numbers its loss and gradient are made of its sums.
template <cross_entropy_form form>
struct cross_entropy_row {
  using sums_of = cross_entropy_sums<form>;
  int label;  // -1: in another slice
  int vocab;  // ids of the row
  int whole;  // ids of the vocabulary
  float label_weight, smoothing, z_loss, softcap;
  float lse, lse_in_twos;
  float upstream, of_label, of_power, share;

  // Computes lse; the thread that `writes` stores the results.
  __device__ __forceinline__ void finish_loss(const sums_of& all, float label_logit, bool writes,
                                              i64 row, float* lses, float* losses, float* logprobs,
                                              float* entropies) {
    const float distance = log2f(all.powers);  // of lse from the largest logit
    lse_in_twos = all.most + distance;
    lse = lse_in_twos * log_of_2;
    if (!writes) return;
    // By its distance from the largest logit, which loses nothing where it is that one.
    const float logprob =
        label < 0 ? 0.0f : ((__fmul_rn(label_logit, log2_of_e) - all.most) - distance) * log_of_2;
    float loss = -(1.0f - smoothing) * label_weight * logprob;
    if (z_loss > 0) loss += z_loss * lse * lse;
    if constexpr (form.smooths) {
      const float weights = form.weighs ? all.weights : static_cast<float>(vocab);
      loss += smoothing / static_cast<float>(whole) * (weights * lse - all.weighted * log_of_2);
    }
    losses[row] = loss;
    lses[row] = lse;
    if (logprobs != nullptr) logprobs[row] = logprob;
    if constexpr (form.entropy) {
      entropies[row] = (distance - all.excess / all.powers) * log_of_2;
    }
  }

  __device__ __forceinline__ void start_gradient(const sums_of& all, float dloss,
                                                 const float* items) {
    upstream = items == nullptr ? dloss : dloss / items[0];
    share = smoothing / static_cast<float>(whole);
    of_label = (1.0f - smoothing) * label_weight;
    of_power = of_label;
    if (z_loss > 0) of_power += 2.0f * z_loss * lse;
    if constexpr (form.smooths)
      of_power += share * (form.weighs ? all.weights : static_cast<float>(whole));
  }

  // Makes the gradient of the logits z from `column` on.
  template <int count>
  __device__ __forceinline__ void make_gradient(float (&z)[count], int column,
                                                const float* class_weights) const {
#pragma unroll
    for (int e = 0; e < count; ++e) {
      const float capped = capped_logit<form.caps>(z[e], softcap);
      float value = of_power * power_of_two(fmaf(capped, log2_of_e, -lse_in_twos));
      if constexpr (form.smooths) value -= share * (form.weighs ? class_weights[column + e] : 1.0f);
      if (column + e == label) value -= of_label;
      if constexpr (form.caps) {
        const float part = capped / softcap;
        value *= 1.0f - part * part;
      }
      z[e] = upstream * value;
    }
  }
};

// The label of a row that has a loss, -1 where it is in another slice.
__device__ __forceinline__ int label_in_slice(i64 label, int vocab) {
  return label < 0 || label >= vocab ? -1 : static_cast<int>(label);
}

// The results of a row that is ignored, or whose label is no id: zeros, or NaN.
__device__ __forceinline__ float value_without_label(bool ignored) {
  return ignored ? 0.0f : __uint_as_float(0x7fc00000u);
}
__device__ __forceinline__ void store_without_label(float value, i64 row, float* lses,
                                                    float* losses, float* logprobs,
                                                    float* entropies) {
  losses[row] = lses[row] = value;
  if (logprobs != nullptr) logprobs[row] = value;
  if (entropies != nullptr) entropies[row] = value;
}

// Grid: rows. Block: `threads`.
template <class T, cross_entropy_form form, int count, int threads>
__global__ void __launch_bounds__(threads, 1024 / threads)
    cross_entropy_rows(const T* logits_of_rows, const i64* labels, const float* class_weights,
                       const float* items, const float* dloss, float* lses, float* losses,
                       float* logprobs, float* entropies, T* dlogits, i64 ignored_label, int vocab,
                       int dloss_stride, float smoothing, float z_loss, float softcap, int whole) {
  using sums_of = cross_entropy_sums<form>;
  using reduction = row_reduction<sums_of, threads, 1, 1>;
  __shared__ typename reduction::memory shared;
  const i64 row = blockIdx.x;
  const T* const logits = logits_of_rows + row * vocab;
  const int first = static_cast<int>(threadIdx.x) * count;
  constexpr int step = threads * count;
  // Vectors in flight; with a soft cap the arithmetic takes the registers.
  constexpr int unrolled = form.caps ? 1 : count >= 4 ? 2 : 4;
  const u64 policy = l2_eviction_policy<false>();
  wait_and_launch_dependents();

  const i64 label = labels[row];
  const bool ignored = label == ignored_label;
  if (ignored || whole == 0 && (label < 0 || label >= vocab)) {
    const float value = value_without_label(ignored);
    if (form.loss && threadIdx.x == 0)
      store_without_label(value, row, lses, losses, logprobs, entropies);
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
  cross_entropy_row<form> of_row;
  of_row.label = label_in_slice(label, vocab);
  of_row.vocab = vocab;
  of_row.whole = whole == 0 ? vocab : whole;
  const float label_logit =
      of_row.label < 0 ? 0.0f : capped_logit<form.caps>(to_float(logits[label]), softcap);
  of_row.label_weight = form.weighs ? class_weights[label] : 1.0f;
  of_row.smoothing = smoothing;
  of_row.z_loss = z_loss;
  of_row.softcap = softcap;
  sums_of own = sums_of::nothing();
  if constexpr (form.loss || (form.smooths && form.weighs)) {
#pragma unroll unrolled
    for (int column = first; column < vocab; column += step) {
      float z[count];
      to_floats(load_once<T, count>(logits + column, true, policy), z);
      own.add(z, column, class_weights, softcap);
    }
  }
  const sums_of all = reduction::apply(own, shared);
  if constexpr (form.loss) {
    of_row.finish_loss(all, label_logit, threadIdx.x == 0, row, lses, losses, logprobs, entropies);
  } else {
    of_row.lse = lses[row];
    of_row.lse_in_twos = of_row.lse * log2_of_e;
  }
  if constexpr (form.gradient) {
    of_row.start_gradient(all, dloss == nullptr ? 1.0f : dloss[row * dloss_stride], items);
    T* const gradient = dlogits + row * vocab;
#pragma unroll unrolled
    for (int column = first; column < vocab; column += step) {
      float z[count];
      to_floats(load_once<T, count>(logits + column, true, policy), z);
      of_row.make_gradient(z, column, class_weights);
      store_once(gradient + column, from_floats<T>(z), policy);
    }
  }
}

#if __CUDA_ARCH__ >= 900
// The sums of a cluster from those of its blocks. Every thread calls it once, and then
// cluster_wait() before the memory is written again: until then others read it.
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
    Value all = Value::nothing();
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

// Sets a block's part of a gradient to one value.
template <class T, int threads>
__device__ __forceinline__ void fill_part(T* gradient, float value, int vectors, u64 policy) {
  constexpr int count = 16 / sizeof(T);
  float values[count];
#pragma unroll
  for (int e = 0; e < count; ++e) values[e] = value;
  for (int i = static_cast<int>(threadIdx.x); i < vectors; i += threads)
    store_once(gradient + i * count, from_floats<T>(values), policy);
}

// Loss and gradient of rows that a cluster has in turn. A block has `part` neighbouring vectors of
// 16 bytes of each, and a thread `held` of these:
//
//   shared memory   | row i + 1 arrives ...              | row i + 2 ...
//   registers       | row i: sums | joined | gradient    | row i + 1 ...
//
// Grid: clusters * cluster. Block: `threads`. Cluster: `cluster`. Shared memory: part * 16 bytes.
template <class T, cross_entropy_form form, int threads, int held, int cluster>
__global__ void __launch_bounds__(threads, 1024 / threads)
    cross_entropy_held(const T* logits_of_rows, const i64* labels, const float* class_weights,
                       const float* items, const float* dloss, float* lses, float* losses,
                       float* logprobs, float* entropies, T* dlogits, i64 ignored_label, int vocab,
                       int dloss_stride, float smoothing, float z_loss, float softcap, int whole,
                       int part, i64 rows) {
  constexpr int count = 16 / sizeof(T);
  using sums_of = cross_entropy_sums<form>;
  using reduction = row_reduction<sums_of, threads, 1, 1>;
  using of_cluster = cluster_reduction<sums_of, cluster>;
  extern __shared__ __align__(128) unsigned char next_row[];
  __shared__ typename reduction::memory shared[2];
  __shared__ typename of_cluster::memory shared_of_cluster;
  __shared__ u64 arrived;
  const int rank = cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int thread = static_cast<int>(threadIdx.x);
  const int begin = rank * part;  // in vectors
  const int vectors = max(0, min(part, vocab / count - begin));
  const bool writes = rank == 0 && thread == 0;
  const u32 barrier = shared_address(&arrived);
  const u64 policy = l2_eviction_policy<false>();
  const u32 zero = static_cast<u32>(vocab) >> 31;  // 0, unknown to the compiler
  if (thread == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
  }
  __syncthreads();
  wait_and_launch_dependents();

  const i64 clusters = gridDim.x / cluster;
  const auto load = [&](i64 row) {
    if (thread != 0 || row >= rows || vectors == 0) return;
    const u32 bytes = static_cast<u32>(vectors) * 16;
    barrier_arrive_expect(barrier, bytes);
    bulk_load(shared_address(next_row), logits_of_rows + row * vocab + begin * count, bytes,
              barrier);
  };
  i64 row = blockIdx.x / cluster;
  load(row);
  i64 label = row < rows ? labels[row] : 0;
  for (u32 turn = 0; row < rows; row += clusters, ++turn) {
    const i64 next_label = row + clusters < rows ? labels[row + clusters] : 0;
    T* const gradient = dlogits + row * vocab + begin * count;
    if (vectors > 0) barrier_wait(barrier, turn & 1);
    const bool ignored = label == ignored_label;
    if (ignored || whole == 0 && (label < 0 || label >= vocab)) {
      __syncthreads();  // the next load begins a phase for which none waits yet
      load(row + clusters);
      const float value = value_without_label(ignored);
      if (writes) store_without_label(value, row, lses, losses, logprobs, entropies);
      fill_part<T, threads>(gradient, value, vectors, policy);
      label = next_label;
      continue;
    }
    cross_entropy_row<form> of_row;
    of_row.label = label_in_slice(label, vocab);
    of_row.vocab = vocab;
    of_row.whole = whole == 0 ? vocab : whole;
    const float label_logit =
        writes && of_row.label >= 0
            ? capped_logit<form.caps>(to_float(logits_of_rows[row * vocab + label]), softcap)
            : 0.0f;
    of_row.label_weight = form.weighs ? class_weights[label] : 1.0f;
    of_row.smoothing = smoothing;
    of_row.z_loss = z_loss;
    of_row.softcap = softcap;
    aligned_vector<T, count> own_part[held];
    sums_of own = sums_of::nothing();
#pragma unroll
    for (int i = 0; i < held; ++i) {
      const int at = thread + i * threads;
      if (at >= vectors) break;
      const float4 loaded = reinterpret_cast<const float4*>(next_row)[at];
      own_part[i].word[0] = __float_as_uint(loaded.x);
      own_part[i].word[1] = __float_as_uint(loaded.y);
      own_part[i].word[2] = __float_as_uint(loaded.z);
      own_part[i].word[3] = __float_as_uint(loaded.w);
      float z[count];
      to_floats(own_part[i], z);
      own.add(z, (begin + at) * count, class_weights, softcap);
    }
    sums_of all = reduction::apply(own, shared[turn & 1]);
    load(row + clusters);  // all threads have read this one, as they have met
    if constexpr (cluster > 1) all = of_cluster::apply(all, shared_of_cluster);
    of_row.finish_loss(all, label_logit, writes, row, lses, losses, logprobs, entropies);
    of_row.start_gradient(all, dloss == nullptr ? 1.0f : dloss[row * dloss_stride], items);
#pragma unroll
    for (int i = 0; i < held; ++i) {
      const int at = thread + i * threads;
      if (at >= vectors) break;
      float z[count];
      to_floats_again(own_part[i], zero, z);
      of_row.make_gradient(z, (begin + at) * count, class_weights);
      store_once(gradient + at * count, from_floats<T>(z), policy);
    }
    if constexpr (cluster > 1) cluster_wait();
    label = next_label;
  }
}
#endif

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
