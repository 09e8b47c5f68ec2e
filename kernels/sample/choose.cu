// The next id of each row of logits (sample/sample.hpp).
//
//   choose_parts      a block has a part of a row, and writes the best id there with the sum of
//                     exp(logits). Grid: rows * parts
//   choose_finish     a block has the parts of a row, of that kernel or of a product that leaves
//                     them (head/choose_decode.cu). Grid: rows
//   choose_filtered   a block has a row. It finds the least key that top-k and top-p keep in up to
//                     three passes each over digits of the keys, then the best of what is kept.
//                     Grid: rows
//   choose_best       a block has a row: its best ids in their order, with log-probabilities. The
//                     least key among them is found in three passes, as for top-k. Grid: rows
#include "common/async.cuh"
#include "common/choice.cuh"

namespace fftune {

constexpr int choose_threads = 256, filter_threads = 1024;

// Adds ids [first, last) of a row, four neighbours at a time: they share the words of a draw.
// keeps(capped logit): whether an id takes part.
template <class T, choice_form form, class Keeps>
__device__ __forceinline__ void choose_among(row_choice<form>& best, const row_scores<form>& scores,
                                             const T* row, int first, int last,
                                             const Keeps& keeps) {
  for (int quad = first / 4 + threadIdx.x; quad * 4 < last; quad += blockDim.x) {
    const random_words words = scores.words(quad);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int id = quad * 4 + i;
      if (id >= last) continue;
      const float logit = scores.cap(to_float(row[id]));
      if constexpr (form.sums) best.add_sum_of(logit);
      if (keeps(logit)) best.take(rank_of(scores.score(logit, words.word[i])), id, logit);
    }
  }
}

// logits [rows, vocab] -> parts [rows, count]. A part has a multiple of four ids.
template <class T, choice_form form>
__global__ void __launch_bounds__(choose_threads)
    choose_parts(const T* logits, const float* temperature, const i64* seeds, const int* steps,
                 choice_part* parts, float softcap, int vocab, int of_part, int count) {
  __shared__ choice_part shared[choose_threads / 32];
  wait_and_launch_dependents();
  const i64 row = static_cast<int>(blockIdx.x) / count;
  row_scores<form> scores{softcap};
  scores.load({temperature, seeds, steps}, row);
  row_choice<form> best;
  const int first = static_cast<int>(blockIdx.x) % count * of_part;
  choose_among(best, scores, logits + row * vocab, first, smaller(first + of_part, vocab),
               [](float) { return true; });
  best.add_block(shared);
  if (threadIdx.x == 0) best.store(parts + blockIdx.x);
}

template <choice_form form>
__global__ void __launch_bounds__(choose_threads)
    choose_finish(const choice_part* parts, int* ids, float* logits, float* logprobs, int count) {
  __shared__ choice_part shared[choose_threads / 32];
  wait_and_launch_dependents();
  const i64 row = blockIdx.x;
  row_choice<form> best;
  for (int i = threadIdx.x; i < count; i += choose_threads) {
    row_choice<form> part;
    part.load(parts[row * count + i]);
    best.add(part);
  }
  best.add_block(shared);
  if (threadIdx.x == 0) best.finish(row, ids, logits, logprobs);
}

namespace {

struct filter_memory {
  u64 bins[most_bins];
  u64 warps[filter_threads / 32];
  u64 limit;
  u32 bin;
  float largest;
};

// Adds to the bins what this warp's lanes weigh. Lanes without an id have bin most_bins.
__device__ __forceinline__ void add_to_bins(u64* bins, int bin, u64 weight) {
  const u32 same = __match_any_sync(~0u, bin);
  // Masses have up to 45 bits: sums of 32 halves fit into 32.
  const u32 low = __reduce_add_sync(same, static_cast<u32>(weight) & 0x3fffffu);
  const u32 high = __reduce_add_sync(same, static_cast<u32>(weight >> 22));
  const bool leads = static_cast<int>(threadIdx.x % 32) == __ffs(same) - 1;
  if (leads && bin < most_bins) atomicAdd(bins + bin, (static_cast<u64>(high) << 22) + low);
}

// The bin in which the sum over all higher ones and it reaches `limit`, and what is left of the
// limit there; bin 0 if no sum does. Thread i has bins most_bins - 1 - 2i and the one below.
__device__ __forceinline__ void find_bin(filter_memory& memory, float part) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int high = most_bins - 1 - 2 * static_cast<int>(threadIdx.x);
  const u64 first = memory.bins[high], second = memory.bins[high - 1];
  u64 sum = first + second;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u64 other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == 31) memory.warps[warp] = sum;
  __syncthreads();
  u64 before = 0, all = 0;
#pragma unroll 1
  for (int i = 0; i < filter_threads / 32; ++i) {
    if (i < warp) before += memory.warps[i];
    all += memory.warps[i];
  }
  // The first digit's sum is that of all ids: a part of it is the limit.
  if (part >= 0) {
    const u64 limit = mass_limit(part, all);
    if (threadIdx.x == 0) memory.limit = limit > 0 ? limit : 1;
    __syncthreads();
  }
  const u64 limit = memory.limit;
  const u64 above = before + sum - first - second;
  __syncthreads();
  if (above < limit && limit <= above + first) {
    memory.bin = high;
    memory.limit = limit - above;
  } else if (above + first < limit && (limit <= above + first + second || high == 1)) {
    memory.bin = high - 1;
    memory.limit = limit - above - first;
  }
  __syncthreads();
}

// The least key that stays: what better ids weigh together is below the limit, which is
// memory.limit, or with part >= 0 that part of what all ids weigh.
template <class Key, class Weight>
__device__ __forceinline__ u32 find_threshold(filter_memory& memory, int vocab, float part,
                                              const Key& key_at, const Weight& weight_of) {
  u32 prefix = 0;
#pragma unroll 1
  for (int digit = 0; digit < key_digits; ++digit) {
    const int shift = digit_shift(digit), bits = digit_bits(digit);
    for (int i = threadIdx.x; i < most_bins; i += filter_threads) memory.bins[i] = 0;
    __syncthreads();
    for (int base = 0; base < vocab; base += filter_threads) {
      const int id = base + threadIdx.x;
      u32 key = 0;
      int bin = most_bins;
      u64 weight = 0;
      if (id < vocab) {
        key = key_at(id);
        if (digit == 0 || key >> (shift + bits) == prefix) {
          weight = weight_of(id, key);
          if (weight > 0) bin = static_cast<int>(key >> shift & ((1u << bits) - 1));
        }
      }
      if (__any_sync(~0u, bin < most_bins)) add_to_bins(memory.bins, bin, weight);
    }
    __syncthreads();
    find_bin(memory, digit == 0 ? part : -1.0f);
    prefix = prefix << bits | memory.bin;
    __syncthreads();
  }
  return prefix;
}

}  // namespace

template <class T, choice_form form>
__global__ void __launch_bounds__(filter_threads, 1)
    choose_filtered(const T* logits, const float* temperature, const i64* seeds, const int* steps,
                    const int* top_k_of_rows, const float* top_p_of_rows,
                    const float* min_p_of_rows, int* ids, float* out_logits, float* logprobs,
                    float softcap, int vocab) {
  __shared__ filter_memory memory;
  __shared__ choice_part shared[filter_threads / 32];
  wait_and_launch_dependents();
  const i64 row = blockIdx.x;
  const T* const own = logits + row * vocab;
  row_scores<form> scores{softcap};
  scores.load({temperature, seeds, steps}, row);
  const auto logit_at = [&](int id) { return scores.cap(to_float(own[id])); };
  u32 least = 0;
  u64 least_mass = 0;
  float largest = 0;
  if (scores.draws()) {
    largest = __int_as_float(0xff800000);
    for (int id = threadIdx.x; id < vocab; id += filter_threads)
      largest = fmaxf(largest, logit_at(id));
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32].largest = largest;
    __syncthreads();
    for (int i = 0; i < filter_threads / 32; ++i) largest = fmaxf(largest, shared[i].largest);
    const auto key_at = [&](int id) { return key_of(logit_at(id)); };
    const int top_k = top_k_of_rows[row];
    if (top_k > 0 && top_k < vocab) {
      if (threadIdx.x == 0) memory.limit = top_k;
      least = find_threshold(memory, vocab, -1.0f, key_at, [](int, u32) { return u64{1}; });
    }
    if (const float top_p = top_p_of_rows[row]; top_p < 1) {
      const u32 of_top_k = least;
      const u32 key =
          find_threshold(memory, vocab, fmaxf(top_p, 0.0f), key_at, [&](int id, u32 key) {
            return key < of_top_k ? u64{0}
                                  : mass_of<rounded>(logit_at(id), largest, scores.reciprocal);
          });
      least = key > least ? key : least;
    }
    least_mass = mass_limit(min_p_of_rows[row], u64{1} << mass_bits);
    __syncthreads();  // `shared` is read
  }
  row_choice<form> best;
  choose_among(best, scores, own, 0, vocab, [&](float logit) {
    if (!scores.draws()) return true;
    return key_of(logit) >= least &&
           (least_mass == 0 || !(logit < largest) ||
            mass_of<rounded>(logit, largest, scores.reciprocal) >= least_mass);
  });
  best.add_block(shared);
  if (threadIdx.x == 0) best.finish(row, ids, out_logits, logprobs);
}

constexpr int most_best = 64;

template <class T>
__global__ void __launch_bounds__(filter_threads, 1)
    choose_best(const T* logits, int* ids, float* logprobs, float softcap, int vocab, int count) {
  constexpr choice_form form{.draws = false, .sums = true};
  __shared__ filter_memory memory;
  __shared__ choice_part shared[filter_threads / 32];
  __shared__ u32 best_keys[most_best];
  __shared__ int best_ids[most_best], equal_of_warps[filter_threads / 32], above;
  __shared__ float log_of_sum;
  wait_and_launch_dependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T* const own = logits + static_cast<i64>(blockIdx.x) * vocab;
  const row_scores<form> scores{softcap};
  const auto logit_at = [&](int id) { return scores.cap(to_float(own[id])); };
  const auto key_at = [&](int id) { return key_of(logit_at(id)); };
  row_choice<form> all;
  for (int id = threadIdx.x; id < vocab; id += filter_threads) all.add_sum_of(logit_at(id));
  all.add_block(shared);
  if (threadIdx.x == 0) {
    log_of_sum = all.largest + logf(all.sum);
    memory.limit = count;
    above = 0;
  }
  __syncthreads();
  const u32 least = find_threshold(memory, vocab, -1.0f, key_at, [](int, u32) { return u64{1}; });
  const int wanted = static_cast<int>(memory.limit);  // of the ids with the least key, the first
  // Those above it in any order, then the others: each sweep of the block counts them in order.
  int equal = 0;
  for (int base = 0; base < vocab; base += filter_threads) {
    const int id = base + static_cast<int>(threadIdx.x);
    const u32 key = id < vocab ? key_at(id) : 0;
    if (id < vocab && key > least) {
      const int place = atomicAdd(&above, 1);
      best_keys[place] = key;
      best_ids[place] = id;
    }
    if (equal >= wanted) continue;
    const bool is_equal = id < vocab && key == least;
    const u32 same = __ballot_sync(~0u, is_equal);
    if (lane == 0) equal_of_warps[warp] = __popc(same);
    __syncthreads();
    int before = equal + __popc(same & ((1u << lane) - 1));
#pragma unroll 1
    for (int i = 0; i < filter_threads / 32; ++i) {
      if (i < warp) before += equal_of_warps[i];
      equal += equal_of_warps[i];
    }
    if (is_equal && before < wanted) {
      best_keys[count - wanted + before] = key;
      best_ids[count - wanted + before] = id;
    }
    __syncthreads();
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= count) return;
  const u32 key = best_keys[threadIdx.x];
  const int id = best_ids[threadIdx.x];
  int place = 0;
  for (int i = 0; i < count; ++i)
    if (best_keys[i] > key || (best_keys[i] == key && best_ids[i] < id)) ++place;
  const i64 at = static_cast<i64>(blockIdx.x) * count + place;
  ids[at] = id;
  logprobs[at] = logit_at(id) - log_of_sum;
}

}  // namespace fftune
