// Latent attention by wgmma, for sm_90a: 64 rows of queries times heads, of which each row of the
// cache is read once, and is key and value in one place of shared memory.
//
//   producer warps (4)        shared memory              MMA warpgroup 0        MMA warpgroup 1
//  +--------------------+    +--------------------+     +------------------+   +----------------+
//  | cp.async: rows of  |    | Q [slab][64 rows]  |     | S = Q K^T  wgmma |   |                |
//  | the cache, in any  |--->| stages [slab][key] |---->| softmax          |   |                |
//  | pages              |    | P, factors         |<--->| P, factors   ----|-->| P, factors     |
//  +--------------------+    +--------------------+     | O += P V: the    |   | O += P V: the  |
//                                                       | first half of V  |   | second half    |
//                                                       +------------------+   +----------------+
//
//  barrier              arrivals that complete a phase            who waits
//  full [stage]         the copies of each producer thread        both MMA warpgroups
//  empty [stage]        a thread of each MMA warpgroup            the producer
//  given (named)        warpgroup 0: P and factors are there      warpgroup 1
//  taken (named)        warpgroup 1: it has read them             warpgroup 0
//
// A stage is released before warpgroup 0 waits for the next one: with two stages one is loaded
// while the other is multiplied. Warpgroup 1 multiplies beneath the first one's softmax. A thread
// of both has the same two rows, so that P goes from registers to registers in the order of the
// threads.
//
// Keys are divided among groups of CTAs as in decode.cu (shares.cuh).
//
// Grid: (row blocks, groups). Block: 384.
#include "attention/softmax.cuh"
#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/wgmma_widths.cuh"
#include "mla/shares.cuh"
#include "mla/sm90_config.cuh"

namespace fftune {

enum class mla_barrier { given = 1, taken = 2, queries = 3, results = 4 };

// Of both MMA warpgroups.
struct mla_sm90_sync {
  static __device__ __forceinline__ void sync() {
    named_barrier_sync(static_cast<int>(mla_barrier::results), 256);
  }
};

template <mla_form form, mla_sm90_config config>
class mla_sm90_kernel : mla_shares<form, config.keys, 64, 256, mla_sm90_sync> {
  using shares_type = mla_shares<form, config.keys, 64, 256, mla_sm90_sync>;
  using shares_type::arrive;
  using shares_type::combine;
  using shares_type::divide;
  using shares_type::find;
  using shares_type::part_of;
  using shares_type::store_lse;
  using shares_type::store_result;
  using shares_type::tile_count;
  using typename shares_type::cut_sequence;
  using typename shares_type::rows_of_queries;
  using T = element_type<form.type>;
  static constexpr mla_sm90_plan plan = mla_sm90_plan_of(form, config);
  static constexpr int rank = form.rank, width = form.width(), keys = config.keys;
  static constexpr int half_rank = rank / 2, chunks = width / 8;  // of 16 bytes of a row
  static constexpr int producer_warps = 4;
  static_assert(rank % 128 == 0 && rank <= 512 && form.rope % 16 == 0);
  static_assert(keys == 32 || keys == 64);

  using stages = pipeline<config.stages, plan.stage_bytes>;
  using scores = float[keys / 2];
  using output = float[half_rank / 2];
  using probabilities = u32[keys / 16][4];

  const mla_params& p_;
  u32 base_;  // of shared memory

  __device__ __forceinline__ stages pipe() const {
    const u32 barriers = base_ + plan.barriers_at;
    return {base_ + plan.stages_at, barriers, barriers + config.stages * 8};
  }
  // Chunk `chunk` of 16 bytes of row `row`, of slabs of `rows` rows.
  static __device__ __forceinline__ u32 place_of(int row, int chunk, int rows) {
    return static_cast<u32>((chunk / 8 * rows + row) * 128 + ((chunk % 8) ^ (row % 8)) * 16);
  }

  // --- Producer warps ---

  // A warp copies whole rows; a lane finds the place of one of these.
  __device__ __forceinline__ void produce(int begin, int end, sequence_tile here) const {
    constexpr int rows_of_warp = keys / producer_warps;
    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32 - 8;
    const T* const cache = static_cast<const T*>(p_.cache);
    stages to = pipe();
    int index = here.index, tile = begin - here.before, tiles = tile_count(p_, index);
    const auto find_row = [&]() -> i64 {
      const int row = lane * producer_warps + warp, key = tile * keys + row;
      if (lane >= rows_of_warp || key >= mla_length<form>(p_, index)) return -1;
      return mla_place<form>(p_, index, key);
    };
    i64 found = find_row();
    for (int at = begin; at < end; ++at, to.advance()) {
      const i64 own = found;
      if (++tile == tiles && at + 1 < end) {
        tile = 0;
        tiles = tile_count(p_, ++index);
      }
      if (at + 1 < end) found = find_row();
      to.wait_empty();
#pragma unroll 4
      for (int i = 0; i < rows_of_warp; ++i) {
        const int row = i * producer_warps + warp;
        const i64 place = __shfl_sync(~0u, own, i);
#pragma unroll
        for (int first = 0; first < chunks; first += 32) {
          const int chunk = first + lane;
          if (first + 32 <= chunks || chunk < chunks) {
            copy_async(to.buffer() + place_of(row, chunk, keys),
                       cache + (place >= 0 ? place + chunk * 8 : 0), place >= 0);
          }
        }
      }
      barrier_arrive_copied(to.full_barrier());
    }
    copy_async_commit();
    copy_async_wait<0>();
  }

  // --- MMA warpgroups ---

  static __device__ __forceinline__ int thread() {
    return threadIdx.x % 128;
  }
  // The first of a thread's two rows; the other is 8 below.
  static __device__ __forceinline__ int own_row() {
    return thread() / 32 * 16 + thread() % 32 / 4;
  }
  static __device__ __forceinline__ void release(u32 empty_barrier) {
    if (thread() == 0) barrier_arrive(empty_barrier);
  }

  // The first warpgroup. Rows behind the last are zeros.
  __device__ __forceinline__ void load_queries(int sequence, const rows_of_queries& own) const {
    for (int i = thread(); i < 64 * chunks; i += 128) {
      const int row = i / chunks, chunk = i % chunks;
      vector16 value = {};
      if (row < own.count) {
        const i64 at = own.at(p_, sequence, row);
        value = chunk * 8 < rank
                    ? load_dependent(static_cast<const T*>(p_.q_latent) + at * rank + chunk * 8)
                    : load_dependent(static_cast<const T*>(p_.q_rope) + at * form.rope + chunk * 8 -
                                     rank);
      }
      store_shared(base_ + place_of(row, chunk, 64),
                   float4{__uint_as_float(value.word[0]), __uint_as_float(value.word[1]),
                          __uint_as_float(value.word[2]), __uint_as_float(value.word[3])});
    }
    async_proxy_fence();
    named_barrier_sync(static_cast<int>(mla_barrier::queries), 128);
  }

  // The producers' copies are of the generic proxy.
  static __device__ __forceinline__ void wait_full(const stages& of) {
    of.wait_full();
    async_proxy_fence();
  }

  __device__ __forceinline__ void issue_scores(scores& s, u32 stage) const {
    const u64 q = wgmma_swizzled_descriptor<128>(base_);
    const u64 k = wgmma_swizzled_descriptor<128>(stage);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < width / 16; ++step) {
      const int slab = step / 4, at = step % 4 * 32;
      wgmma<T, keys>(s, wgmma_advance(q, slab * 64 * 128 + at),
                     wgmma_advance(k, slab * keys * 128 + at), step > 0 ? 1 : 0);
    }
    wgmma_commit();
  }

  // The product with half of the columns of the values.
  static __device__ __forceinline__ void issue_values(output& o, const probabilities& from,
                                                      u32 stage, int half, int accumulate) {
    const u64 v = wgmma_swizzled_descriptor<128, keys * 128>(
        stage + static_cast<u32>(half) * (half_rank / 64) * keys * 128);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < keys / 16; ++step) {
      wgmma_of_width<T, half_rank, true>(o, from[step], wgmma_advance(v, step * 16 * 128),
                                         step > 0 ? 1 : accumulate);
    }
    wgmma_commit();
  }

  // Scores that a row does not see become minus infinity.
  static __device__ __forceinline__ void mask(scores& s, int key, const int (&visible)[2]) {
#pragma unroll
    for (int i = 0; i < keys / 2; ++i) {
      const int j = key + i / 4 * 8 + thread() % 4 * 2 + i % 2;
      if (j >= visible[i / 2 % 2]) s[i] = minus_infinity();
    }
  }

  // Turns scores into powers of two; factors of what was computed before.
  static __device__ __forceinline__ void exponentiate(scores& s, softmax_row (&row)[2],
                                                      float factor, float (&rescale)[2]) {
    float largest[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
    for (int i = 0; i < keys / 2; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] *= factor;
      rescale[i] = 1.0f;
    }
    if (__any_sync(~0u, row[0].exceeded_by(largest[0]) || row[1].exceeded_by(largest[1]))) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], 1));
        largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], 2));
        rescale[i] = row[i].rescale_if_exceeded(largest[i]);
      }
    }
    const float offset[2] = {row[0].offset(), row[1].offset()};
#pragma unroll
    for (int i = 0; i < keys / 2; ++i) {
      s[i] = approximate_exp2(__fmaf_rn(s[i], factor, -offset[i / 2 % 2]));
      row[i / 2 % 2].sum += s[i];
    }
  }

  static __device__ __forceinline__ void scale(output& o, const float (&by)[2]) {
    if (__all_sync(~0u, by[0] == 1.0f && by[1] == 1.0f)) return;
#pragma unroll
    for (int i = 0; i < half_rank / 2; ++i) o[i] *= by[i / 2 % 2];
  }

  // What the first warpgroup gives to the second: probabilities, if there are, and two floats of
  // each thread.
  __device__ __forceinline__ void give(const probabilities* from, const float (&floats)[2]) const {
    named_barrier_sync(static_cast<int>(mla_barrier::taken), 256);
    if (from != nullptr) {
#pragma unroll
      for (int step = 0; step < keys / 16; ++step) {
        const u32(&word)[4] = (*from)[step];
        store_shared(base_ + plan.given_at + (step * 128 + thread()) * 16,
                     float4{__uint_as_float(word[0]), __uint_as_float(word[1]),
                            __uint_as_float(word[2]), __uint_as_float(word[3])});
      }
    }
    store_shared(base_ + plan.factors_at + thread() * 8, float2{floats[0], floats[1]});
    named_barrier_arrive(static_cast<int>(mla_barrier::given), 256);
  }
  __device__ __forceinline__ void take(probabilities* to, float (&floats)[2]) const {
    named_barrier_sync(static_cast<int>(mla_barrier::given), 256);
    if (to != nullptr) {
#pragma unroll
      for (int step = 0; step < keys / 16; ++step) {
        const float4 word = load_shared(base_ + plan.given_at + (step * 128 + thread()) * 16);
        (*to)[step][0] = __float_as_uint(word.x);
        (*to)[step][1] = __float_as_uint(word.y);
        (*to)[step][2] = __float_as_uint(word.z);
        (*to)[step][3] = __float_as_uint(word.w);
      }
    }
    const float2 pair = load_shared_pair(base_ + plan.factors_at + thread() * 8);
    floats[0] = pair.x;
    floats[1] = pair.y;
    named_barrier_arrive(static_cast<int>(mla_barrier::taken), 256);
  }

  // `tiles` tiles of one sequence, the first of which begins with key `key`.
  __device__ __forceinline__ void first_half(stages& stage, output& o, softmax_row (&row)[2],
                                             int tiles, int key, int length,
                                             const rows_of_queries& own) const {
    const int common = mla_visible(p_, own.query(p_, 0), length);
    int visible[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      visible[i] = mla_visible(p_, own.query(p_, own_row() + i * 8), length);
    const float factor = p_.scale * log2_e;
    alignas(16) scores s;
    probabilities from;
    float rescale[2];
    const auto to_powers = [&] {
      if (key + keys > common) mask(s, key, visible);
      exponentiate(s, row, factor, rescale);
      key += keys;
    };
    const auto give_powers = [&] {
#pragma unroll
      for (int i = 0; i < keys / 4; ++i) from[i / 4][i % 4] = pack<T>(s[i * 2], s[i * 2 + 1]);
      give(&from, rescale);
    };
    for (int tile = 0; tile < tiles; ++tile, stage.advance()) {
      wait_full(stage);
      issue_scores(s, stage.buffer());
      wgmma_wait<0>();
      to_powers();
      if (tile > 0) scale(o, rescale);
      give_powers();
      issue_values(o, from, stage.buffer(), 0, tile > 0 ? 1 : 0);
      wgmma_wait<0>();
      release(stage.empty_barrier());
    }
  }

  __device__ __forceinline__ void second_half(stages& stage, output& o, int tiles) const {
    probabilities from;
    float rescale[2];
    for (int tile = 0; tile < tiles; ++tile, stage.advance()) {
      wait_full(stage);
      take(&from, rescale);
      if (tile > 0) scale(o, rescale);
      issue_values(o, from, stage.buffer(), 1, tile > 0 ? 1 : 0);
      wgmma_wait<0>();
      release(stage.empty_barrier());
    }
  }

  // The results of a sequence, or those of a part of one to `words`.
  __device__ __forceinline__ void store_rows(int sequence, const rows_of_queries& own,
                                             const output& o, const float (&factors)[2], int half,
                                             float* words) const {
    const int first_column = half * half_rank + thread() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = own_row() + i * 8;
      if (row >= own.count) continue;
      const i64 at = own.at(p_, sequence, row);
#pragma unroll
      for (int block = 0; block < half_rank / 8; ++block) {
        const int column = first_column + block * 8;
        const float first = o[block * 4 + i * 2], second = o[block * 4 + i * 2 + 1];
        if (words != nullptr) {
          store_coherent(words + row * rank + column, float2{first, second});
        } else {
          store_result(p_, at, column, first * factors[i], second * factors[i]);
        }
      }
    }
  }
  __device__ __forceinline__ void store_softmax(int sequence, const rows_of_queries& own,
                                                const softmax_row (&whole)[2], float* words) const {
    if (thread() % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = own_row() + i * 8;
      if (row >= own.count) continue;
      if (words != nullptr) {
        store_coherent(words + 64 * rank + row * 2, float2{whole[i].reference, whole[i].sum});
      } else {
        store_lse(p_, sequence, own.first + row, finish_softmax(whole[i], minus_infinity()).lse);
      }
    }
  }

  __device__ __forceinline__ void multiply(const tile_division& shares, int begin, int end,
                                           sequence_tile here, const rows_of_queries& own) const {
    const int half = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    stages stage = pipe();
    cut_sequence cut = {}, second_cut = {};
    int cuts = 0;
    alignas(16) output o;
    if (half == 1) named_barrier_arrive(static_cast<int>(mla_barrier::taken), 256);
    for (int at = begin;;) {
      const int after = here.before + tile_count(p_, here.index), stop = smaller(after, end);
      const int first_group = shares.group_of(here.before), last_group = shares.group_of(after - 1);
      const bool is_cut = first_group != last_group;
      float* const words =
          is_cut ? part_of(p_, static_cast<int>(blockIdx.y), here.before > begin ? 1 : 0) : nullptr;
      float factors[2];
      if (half == 0) {
        load_queries(here.index, own);
        softmax_row row[2];
        first_half(stage, o, row, stop - at, (at - here.before) * keys,
                   mla_length<form>(p_, here.index), own);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          row[i].sum += __shfl_xor_sync(~0u, row[i].sum, 1);
          row[i].sum += __shfl_xor_sync(~0u, row[i].sum, 2);
          factors[i] = finish_softmax(row[i], minus_infinity()).factor;
        }
        give(nullptr, factors);
        store_softmax(here.index, own, row, words);
      } else {
        second_half(stage, o, stop - at);
        take(nullptr, factors);
      }
      at = stop;
      store_rows(here.index, own, o, factors, half, words);
      if (is_cut) {
        cut_sequence& own_cut = cuts++ == 0 ? cut : second_cut;
        own_cut = {here.index, first_group, last_group - first_group + 1,
                   shares.begin(first_group) < here.before ? 1 : 0};
        arrive(p_, own_cut);
      }
      if (after >= end) break;
      here = {here.index + 1, after};
    }
    // Whoever arrives is waited for.
    if (half == 0) named_barrier_sync(static_cast<int>(mla_barrier::taken), 256);
    if (cuts > 0) combine(p_, cut, own);
    if (cuts > 1) combine(p_, second_cut, own);
  }

 public:
  __device__ __forceinline__ mla_sm90_kernel(const mla_params& p, u32 base) : p_(p), base_(base) {}

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) {
      const stages all = pipe();
#pragma unroll
      for (int stage = 0; stage < config.stages; ++stage) {
        barrier_init(all.full + stage * 8, 32 * producer_warps);
        barrier_init(all.empty + stage * 8, 2);
      }
      barrier_init_fence();
    }
    __syncthreads();
    wait_and_launch_dependents();
    const tile_division shares = divide(p_);
    const int group = static_cast<int>(blockIdx.y);
    if (group >= shares.groups) return;
    const int begin = shares.begin(group), end = shares.begin(group + 1);
    const sequence_tile here = find(p_, begin);
    if (threadIdx.x >= 256) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 48;");
      produce(begin, end, here);
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
      rows_of_queries own;
      own.first = static_cast<int>(blockIdx.x) * 64;
      own.count = smaller(64, p_.queries * p_.heads - own.first);
      multiply(shares, begin, end, here, own);
    }
  }
};

template <mla_form form, mla_sm90_config config>
__global__ void __launch_bounds__(384, 1) mla_sm90(const __grid_constant__ mla_params p) {
  extern __shared__ unsigned char shared_memory[];
  const u32 base = (shared_address(shared_memory) + 1023) & ~1023u;  // swizzle atoms
  mla_sm90_kernel<form, config>(p, base).run();
}

}  // namespace fftune
