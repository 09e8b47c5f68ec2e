// The keys of the highest scores, in ascending order (indexer/indexer.hpp).
//
// A block has a query at a time. It finds the lowest score among the best, as the threshold of an
// unsigned key, in three passes over digits of the keys, the highest first: a pass counts the keys
// of each digit that agree with the threshold so far. Then each warp takes a part of the keys,
// counts those above and at the threshold, and writes the chosen ones behind those of the warps
// before it.
//
// Grid: queries of all sequences, which loops. Block: `threads` threads. Dynamic shared memory:
// p.held keys.
#include "common/async.cuh"
#include "common/sampling.cuh"
#include "indexer/visible.cuh"

namespace fftune {
namespace {

template <int threads>
struct choice_memory {
  u32 bins[most_bins];
  u32 sums[threads / 32];
  u32 bin, limit;
  int above[threads / 32], equal[threads / 32];
};

// The bin in which the count of all higher ones and it reaches the limit, and what is left of the
// limit there. A thread has some neighbouring bins, the first thread the highest.
template <int threads>
__device__ __forceinline__ void find_count(choice_memory<threads>& memory) {
  constexpr int own = most_bins / threads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int high = most_bins - 1 - static_cast<int>(threadIdx.x) * own;
  u32 sum = 0;
#pragma unroll
  for (int i = 0; i < own; ++i) sum += memory.bins[high - i];
  u32 before = sum;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u32 other = __shfl_up_sync(~0u, before, distance);
    if (lane >= distance) before += other;
  }
  if (lane == 31) memory.sums[warp] = before;
  before -= sum;
  const u32 limit = memory.limit;
  __syncthreads();
  for (int i = 0; i < warp; ++i) before += memory.sums[i];
  if (before < limit && limit <= before + sum) {
    int bin = high;
    while (before + memory.bins[bin] < limit) before += memory.bins[bin--];
    memory.bin = static_cast<u32>(bin);
    memory.limit = limit - before;
  }
  __syncthreads();
}

// Calls visit(key, place, exists) for all scores of this warp's part, 32 at a time.
template <class KeyAt, class Visit>
__device__ __forceinline__ void for_each_of_warp(int first, int last, const KeyAt& key_at,
                                                 const Visit& visit) {
  for (int base = first; base < last; base += 32) {
    const int place = base + static_cast<int>(threadIdx.x % 32);
    const bool exists = place < last;
    visit(exists ? key_at(place) : 0, place, exists);
  }
}

}  // namespace

template <bool has_lengths, int threads>
__global__ void __launch_bounds__(threads)
    indexer_choose(const __grid_constant__ indexer_params p) {
  static_assert(most_bins % threads == 0 && threads % 32 == 0);
  constexpr int warps = threads / 32;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  __shared__ choice_memory<threads> memory;
  u32* const held = reinterpret_cast<u32*>(shared_memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 lower_lanes = (1u << lane) - 1;
  wait_and_launch_dependents();

  const i64 rows = static_cast<i64>(p.batch) * p.queries;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const int length = indexer_length<has_lengths>(p, static_cast<int>(row / p.queries));
    const int count = indexer_visible(p, static_cast<int>(row % p.queries), length);
    const float* const scores = p.scores + row * p.kv_len;
    int* const ids = p.ids + row * p.top;
    if (count <= p.top) {
      for (int i = threadIdx.x; i < p.top; i += threads) ids[i] = i < count ? i : -1;
      continue;
    }
    const auto key_at = [&](int i) { return i < p.held ? held[i] : key_of(scores[i]); };

    u32 prefix = 0;
    if (threadIdx.x == 0) memory.limit = static_cast<u32>(p.top);
#pragma unroll
    for (int digit = 0; digit < key_digits; ++digit) {
      const int shift = digit_shift(digit), bits = digit_bits(digit);
      for (int i = threadIdx.x; i < most_bins; i += threads) memory.bins[i] = 0;
      __syncthreads();
      for (int base = 0; base < count; base += threads) {
        const int i = base + static_cast<int>(threadIdx.x);
        u32 key = 0, bin = most_bins;
        if (i < count) {
          key = digit == 0 ? key_of(scores[i]) : key_at(i);
          if (digit == 0 && i < p.held) held[i] = key;
          if (digit == 0 || key >> (shift + bits) == prefix)
            bin = key >> shift & ((1u << bits) - 1);
        }
        if (digit == 0) {
          // Scores share few exponents: lanes of one bin add together.
          const u32 same = __match_any_sync(~0u, bin);
          if (bin < most_bins && (same & lower_lanes) == 0) {
            atomicAdd(memory.bins + bin, static_cast<u32>(__popc(same)));
          }
        } else if (bin < most_bins) {
          atomicAdd(memory.bins + bin, 1u);
        }
      }
      __syncthreads();
      find_count(memory);
      prefix = prefix << bits | memory.bin;
    }
    const u32 least = prefix;
    const int wanted = static_cast<int>(memory.limit);  // of those equal to it, the first

    const int part = ceil_div(ceil_div(count, warps), 32) * 32;
    const int first = smaller(warp * part, count), last = smaller(first + part, count);
    int above = 0, equal = 0;
    for_each_of_warp(first, last, key_at, [&](u32 key, int, bool exists) {
      above += __popc(__ballot_sync(~0u, exists && key > least));
      equal += __popc(__ballot_sync(~0u, exists && key == least));
    });
    if (lane == 0) memory.above[warp] = above, memory.equal[warp] = equal;
    __syncthreads();
    above = equal = 0;
    for (int i = 0; i < warp; ++i) above += memory.above[i], equal += memory.equal[i];
    for_each_of_warp(first, last, key_at, [&](u32 key, int place, bool exists) {
      const u32 all_above = __ballot_sync(~0u, exists && key > least);
      const u32 all_equal = __ballot_sync(~0u, exists && key == least);
      const int equal_before = equal + __popc(all_equal & lower_lanes);
      if (exists && (key > least || (key == least && equal_before < wanted))) {
        ids[above + __popc(all_above & lower_lanes) + smaller(equal_before, wanted)] = place;
      }
      above += __popc(all_above);
      equal += __popc(all_equal);
    });
    __syncthreads();  // the memory is read
  }
}

}  // namespace fftune
