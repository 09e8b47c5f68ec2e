// Latent attention by wgmma, for sm_90a: 64 rows of queries times heads. Each row of the cache is
// read once, and is key and value in one place of shared memory.
//
//   producer warps (4)        shared memory              MMA warpgroup 0        MMA warpgroup 1
//  +--------------------+    +--------------------+     +------------------+   +------------------+
//  | Q by cp.async, and |    | Q [slab][64 rows]  |     | Sa = Q Ka^T      |   | Sb = Q Kb^T      |
//  | rows of the cache  |--->| stages [slab][key] |---->| softmax: Pa    --|-->| O += Pa Va       |
//  | by it or by TMA    |    | P, floats          |<--->| O += Pa Va       |   | softmax: Pb      |
//  +--------------------+    +--------------------+     | O += Pb Vb     <-|---| O += Pb Vb       |
//                                                       | O: columns of    |   | O: columns of    |
//                                                       | the first half   |   | the second half  |
//                                                       +------------------+   +------------------+
//
// Tiles of keys are taken in pairs. Warpgroup 0 computes the probabilities of the first tile and
// warpgroup 1 those of the second, and each multiplies both with its half of the columns of the
// values. The tensor cores run the MMAs of one warpgroup beneath the softmax of the other. (The
// order of FlashMLA's dense decoding, which it calls seesaw.)
//
// The softmax reference of a row passes from one warpgroup to the other with the probabilities, so
// that both halves of O are relative to the same one. A thread of both warpgroups has the same two
// rows, so P goes from registers to registers in the order of the threads, and only the warps of
// equal number wait for each other.
//
//  barrier              arrivals that complete a phase            who waits
//  full [stage][slab]   the copies of each producer thread, or    both MMA warpgroups
//                       as many by the one that starts TMA
//  empty [stage][piece] a thread of the piece's last reader, of   the producers
//                       each CTA of the cluster
//  q_full               the copies of each producer thread        both MMA warpgroups
//  q_empty              a thread of each MMA warpgroup            the producers
//  first [warp]         named: warpgroup 0 has stored Pa          the warp of warpgroup 1
//  second [warp]        named: warpgroup 1 has stored Pb          the warp of warpgroup 0
//
// A stage is loaded and multiplied slab by slab, 64 elements of its rows each, and is released in
// three pieces: the rotated part after the scores, each half of the latent part after the last MMA
// of its warpgroup.
//
// With a cluster, CTAs of neighbouring row blocks have the same tiles: each loads its part of the
// rows of a tile into all of them, so that the L2 delivers each row once for the cluster.
//
// Keys are divided among groups of CTAs as in decode.cu (shares.cuh).
//
// Grid: (row blocks, groups). Block: 384. Cluster: config.cluster row blocks.
#include "attention/softmax.cuh"
#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/wgmma_widths.cuh"
#include "mla/shares.cuh"
#include "mla/sm90_config.cuh"

namespace fftune {

// Named barriers: `first` and `second` are those of warp 0, followed by those of warps 1 to 3.
enum class mla_barrier { results = 1, first = 2, second = 6 };

// Both MMA warpgroups.
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
  using shares_type::tile_count;
  using typename shares_type::cut_sequence;
  using typename shares_type::rows_of_queries;
  using T = element_type<form.type>;
  static constexpr mla_sm90_plan plan = mla_sm90_plan_of(form, config);
  static constexpr int rank = form.rank, width = form.width(), keys = config.keys;
  static constexpr int half_rank = rank / 2, chunks = width / 8;  // of 16 bytes of a row
  static constexpr int slabs = plan.slabs, latent_slabs = rank / 64;
  static constexpr int producer_warps = 4;
  static_assert(rank % 128 == 0 && rank <= 512 && form.rope % 16 == 0);
  static_assert(keys == 32 || keys == 64);

  using scores = float[keys / 2];
  using output = float[half_rank / 2];
  using probabilities = u32[keys / 16][4];

  // The stage that is next, and the phase of its barriers.
  struct stage_state {
    int index = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance() {
      if (++index == config.stages) {
        index = 0;
        phase ^= 1;
      }
    }
  };
  // What is released at once: the slabs of a warpgroup's half of the values, and those behind them.
  enum piece { first_half = 0, second_half = 1, rotated = 2 };
  static constexpr int first_slab(int of) { return of * latent_slabs / 2; }
  static constexpr int last_slab(int of) { return of == rotated ? slabs : first_slab(of + 1); }

  const mla_params& p_;
  const tensor_map& map_;
  u32 base_;  // of shared memory

  __device__ __forceinline__ u32 buffer(const stage_state& of) const {
    return base_ + plan.stages_at + of.index * plan.stage_bytes;
  }
  __device__ __forceinline__ u32 full_barrier(const stage_state& of, int slab) const {
    return base_ + plan.barriers_at + (of.index * plan.stage_barriers() + slab) * 8;
  }
  __device__ __forceinline__ u32 empty_barrier(const stage_state& of, int piece) const {
    return full_barrier(of, slabs + piece);
  }
  __device__ __forceinline__ u32 q_full() const {
    return base_ + plan.barriers_at + config.stages * plan.stage_barriers() * 8;
  }
  __device__ __forceinline__ u32 q_empty() const { return q_full() + 8; }

  // --- Producer warps ---
  //
  // A warp copies 4 rows of a slab at once: 8 lanes have the 128 bytes of one row.

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  // Row number `i` of this lane, of `rows` rows that the producer warps share.
  static __device__ __forceinline__ int copied_row(int i, int rows) {
    return (static_cast<int>(threadIdx.x) / 32 - 8) * (rows / producer_warps) + i * 4 + lane() / 8;
  }
  // This lane's chunk of slab `slab` of a row, in `tile`, of `rows` rows.
  static __device__ __forceinline__ u32 copied_place(u32 tile, int slab, int row, int rows) {
    return tile + static_cast<u32>((slab * rows + row) * 128 + ((lane() % 8) ^ (row % 8)) * 16);
  }
  static __device__ __forceinline__ bool has_chunk(int slab) {
    return slab * 8 + 8 <= chunks || slab * 8 + lane() % 8 < chunks;
  }

  // Rows behind the last are zeros.
  __device__ __forceinline__ void load_queries(int sequence, const rows_of_queries& own) const {
    const T* const latent = static_cast<const T*>(p_.q_latent);
    const T* const rope = static_cast<const T*>(p_.q_rope);
#pragma unroll 1
    for (int i = 0; i < 64 / producer_warps / 4; ++i) {
      const int row = copied_row(i, 64);
      const bool valid = row < own.count;
      const i64 at = valid ? own.at(p_, sequence, row) : 0;
#pragma unroll
      for (int slab = 0; slab < slabs; ++slab) {
        if (!has_chunk(slab)) continue;
        const int element = slab * 64 + lane() % 8 * 8;
        const T* const from = slab < latent_slabs ? latent + at * rank + element
                                                  : rope + at * form.rope + element - rank;
        copy_async(copied_place(base_, slab, row, 64), from, valid);
      }
    }
    barrier_arrive_copied(q_full());
  }

  static constexpr int rows_of_lane = keys / producer_warps / 4;
  // Where a tile lies: a box of the tensor map, where TMA loads it, or the first elements of this
  // lane's rows, -1 for zeros.
  struct tile_place {
    bool is_box;
    int row, page;
    i64 of[rows_of_lane];
  };
  __device__ __forceinline__ void find_rows(tile_place& places, int sequence, int tile) const {
    const int length = mla_length<form>(p_, sequence);
    places.is_box = config.tma != 0 && (tile + 1) * keys <= length;
    if (places.is_box) {
      // Out of the tensor map TMA writes zeros, as is right for a page that is not in the cache.
      const int key = tile * keys;
      places.row = form.paged ? key % p_.page : key;
      places.page = sequence;
      if constexpr (form.paged) {
        places.page =
            p_.pages[static_cast<i64>(sequence) * ceil_div(p_.kv_len, p_.page) + key / p_.page];
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < rows_of_lane; ++i) {
      const int key = tile * keys + copied_row(i, keys);
      places.of[i] = key < length ? mla_place<form>(p_, sequence, key) : -1;
    }
  }

  __device__ __forceinline__ void load_piece(const stage_state& to, int piece,
                                             const tile_place& places) const {
    const T* const cache = static_cast<const T*>(p_.cache) + lane() % 8 * 8;
    const u32 stage = buffer(to);
    barrier_wait(empty_barrier(to, piece), to.phase ^ 1);
    if (places.is_box) {
      if (threadIdx.x / 32 != 8 || !is_elected()) return;
#pragma unroll
      for (int slab = first_slab(piece); slab < last_slab(piece); ++slab) {
        const u32 full = full_barrier(to, slab);
        barrier_expect(full, keys * 128);
        if constexpr (config.cluster == 1) {
          tma_load(stage + slab * keys * 128, map_, full, slab * 64, places.row, places.page,
                   l2_policy::evict_normal);
        } else {
          const int row = static_cast<int>(cluster_rank()) * config.box_rows();
          tma_load_multicast(stage + (slab * keys + row) * 128, map_, full, slab * 64,
                             places.row + row, places.page, (1u << config.cluster) - 1,
                             l2_policy::evict_normal);
        }
        barrier_arrive(full, 32u * producer_warps);
      }
      return;
    }
#pragma unroll
    for (int slab = first_slab(piece); slab < last_slab(piece); ++slab) {
      if (has_chunk(slab)) {
#pragma unroll
        for (int i = 0; i < rows_of_lane; ++i) {
          const i64 place = places.of[i];
          copy_async(copied_place(stage, slab, copied_row(i, keys), keys),
                     cache + (place >= 0 ? place + slab * 64 : 0), place >= 0);
        }
      }
      barrier_arrive_copied(full_barrier(to, slab));
    }
  }

  __device__ __forceinline__ void produce(int begin, int end, sequence_tile here,
                                          const rows_of_queries& own) const {
    stage_state to;
    u32 q_phase = 1;
    tile_place found;
    find_rows(found, here.index, begin - here.before);
    for (int at = begin;;) {
      const int after = here.before + tile_count(p_, here.index), stop = smaller(after, end);
      barrier_wait(q_empty(), q_phase);
      q_phase ^= 1;
      load_queries(here.index, own);
      for (; at < stop; to.advance()) {
        if constexpr (slabs > latent_slabs) load_piece(to, rotated, found);
        load_piece(to, first_half, found);
        load_piece(to, second_half, found);
        // The table of pages is read while the next stage is waited for.
        if (++at < end) {
          const bool next = at == after;
          find_rows(found, here.index + (next ? 1 : 0), next ? 0 : at - here.before);
        }
      }
      if (after >= end) break;
      here = {here.index + 1, after};
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
  static __device__ __forceinline__ void arrive_once(u32 barrier) {
    if (thread() == 0) barrier_arrive(barrier);
  }
  // In all CTAs that load for this one.
  __device__ __forceinline__ void release(const stage_state& of, int piece) const {
    if constexpr (config.cluster == 1) {
      arrive_once(empty_barrier(of, piece));
    } else if (thread() < config.cluster) {
      barrier_arrive_remote(empty_barrier(of, piece), static_cast<u32>(thread()));
    }
  }

  // The producers' copies are of the generic proxy.
  __device__ __forceinline__ void wait_slab(const stage_state& of, int slab) const {
    barrier_wait(full_barrier(of, slab), of.phase);
    async_proxy_fence();
  }
  __device__ __forceinline__ void wait_piece(const stage_state& of, int piece) const {
#pragma unroll
    for (int slab = first_slab(piece); slab < last_slab(piece); ++slab) {
      barrier_wait(full_barrier(of, slab), of.phase);
    }
    async_proxy_fence();
  }

  // The slabs of a stage in the order in which they are loaded.
  __device__ __forceinline__ void issue_scores(scores& s, const stage_state& from) const {
    const u64 q = wgmma_swizzled_descriptor<128>(base_);
    const u64 k = wgmma_swizzled_descriptor<128>(buffer(from));
#pragma unroll
    for (int i = 0; i < slabs; ++i) {
      const int slab = (latent_slabs + i) % slabs;
      wait_slab(from, slab);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (slab * 4 + step >= width / 16) continue;
        wgmma<T, keys>(s, wgmma_advance(q, slab * 64 * 128 + step * 32),
                       wgmma_advance(k, slab * keys * 128 + step * 32), i + step > 0 ? 1 : 0);
      }
    }
    wgmma_commit();
  }

  // Adds the product with half of the columns of the values. (An accumulator that the first product
  // of a sequence would overwrite, instead of zeros, were live from the kernel's begin on.)
  template <int half>
  __device__ __forceinline__ void issue_values(output& o, const probabilities& from,
                                               const stage_state& of) const {
    const u64 v = wgmma_swizzled_descriptor<128, keys * 128>(
        buffer(of) + static_cast<u32>(half) * (half_rank / 64) * keys * 128);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < keys / 16; ++step) {
      wgmma_of_width<T, half_rank, true>(o, from[step], wgmma_advance(v, step * 16 * 128), 1);
    }
    wgmma_commit();
  }

  // The rows of a warpgroup's threads: their softmax, and the keys that they see.
  struct row_pair {
    softmax_row softmax[2];
    int visible[2], common;  // common: keys that all rows of the CTA see
  };

  // Scores that a row does not see become minus infinity.
  static __device__ __forceinline__ void mask(scores& s, int key, const int (&visible)[2]) {
#pragma unroll
    for (int i = 0; i < keys / 2; ++i) {
      const int j = key + i / 4 * 8 + thread() % 4 * 2 + i % 2;
      if (j >= visible[i / 2 % 2]) s[i] = minus_infinity();
    }
  }

  // Turns the scores of the keys from `key` on into powers of two, as operand A of an MMA. rescale:
  // factors of what was computed with the references before.
  __device__ __forceinline__ void exponentiate(scores& s, probabilities& to, row_pair& rows,
                                               int key, float (&rescale)[2]) const {
    const float factor = p_.scale * log2_e;
    if (key + keys > rows.common) mask(s, key, rows.visible);
    softmax_row(&row)[2] = rows.softmax;
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
    for (int i = 0; i < keys / 4; ++i) {
      const int r = i % 2;
      const float first = approximate_exp2(__fmaf_rn(s[i * 2], factor, -offset[r]));
      const float second = approximate_exp2(__fmaf_rn(s[i * 2 + 1], factor, -offset[r]));
      row[r].sum += first + second;
      to[i / 4][i % 4] = pack<T>(first, second);
    }
  }

  static __device__ __forceinline__ bool is_scaled(const float (&by)[2]) {
    return __any_sync(~0u, by[0] != 1.0f || by[1] != 1.0f);
  }
  static __device__ __forceinline__ void scale(output& o, const float (&by)[2]) {
    if (!is_scaled(by)) return;
#pragma unroll
    for (int i = 0; i < half_rank / 2; ++i) o[i] *= by[i / 2 % 2];
  }

  // --- What the MMA warpgroups exchange ---
  //
  // They store and load in turn, the first warpgroup first, each thread in the same place: there is
  // one copy of P and of the floats.

  static __device__ __forceinline__ int exchange_barrier(mla_barrier of) {
    return static_cast<int>(of) + __shfl_sync(~0u, thread() / 32, 0);
  }
  // Warpgroup `half` stores.
  template <int half>
  __device__ __forceinline__ void give_floats(float first, float second) const {
    store_shared(base_ + plan.floats_at + thread() * 8, float2{first, second});
    named_barrier_arrive(exchange_barrier(half == 0 ? mla_barrier::first : mla_barrier::second),
                         64);
  }
  template <int half>
  __device__ __forceinline__ void give(const probabilities& from, const row_pair& rows) const {
#pragma unroll
    for (int step = 0; step < keys / 16; ++step) {
      const u32(&word)[4] = from[step];
      store_shared(base_ + plan.exchange_at + (step * 128 + thread()) * 16,
                   float4{__uint_as_float(word[0]), __uint_as_float(word[1]),
                          __uint_as_float(word[2]), __uint_as_float(word[3])});
    }
    give_floats<half>(rows.softmax[0].reference, rows.softmax[1].reference);
  }
  // Warpgroup `half` loads what the other one stored.
  template <int half>
  __device__ __forceinline__ float2 take_floats() const {
    named_barrier_sync(exchange_barrier(half == 0 ? mla_barrier::second : mla_barrier::first), 64);
    return load_shared_pair(base_ + plan.floats_at + thread() * 8);
  }
  template <int half>
  __device__ __forceinline__ void take(probabilities& to, row_pair& rows,
                                       float (&rescale)[2]) const {
    const float2 references = take_floats<half>();
    rescale[0] = rows.softmax[0].rescale(references.x);
    rescale[1] = rows.softmax[1].rescale(references.y);
#pragma unroll
    for (int step = 0; step < keys / 16; ++step) {
      const float4 word = load_shared(base_ + plan.exchange_at + (step * 128 + thread()) * 16);
      to[step][0] = __float_as_uint(word.x);
      to[step][1] = __float_as_uint(word.y);
      to[step][2] = __float_as_uint(word.z);
      to[step][3] = __float_as_uint(word.w);
    }
  }

  // --- The tiles of a sequence ---

  // `tiles` tiles of one sequence, the first of which begins with key `key`: warpgroup 0.
  __device__ __forceinline__ void multiply_first(stage_state& stage, output& o, row_pair& rows,
                                                 int tiles, int key) const {
    probabilities own, other;
    float rescale[2];
    for (int tile = 0; tile < tiles; tile += 2, key += 2 * keys) {
      scores s;
      const stage_state a = stage;
      stage.advance();
      issue_scores(s, a);
      wgmma_wait<0>();
      if (slabs > latent_slabs) release(a, rotated);
      if (tile + 2 >= tiles) arrive_once(q_empty());
      exponentiate(s, own, rows, key, rescale);
      give<0>(own, rows);
      if (tile > 0) scale(o, rescale);
      issue_values<0>(o, own, a);
      if (tile + 1 < tiles) {
        const stage_state b = stage;
        stage.advance();
        wait_piece(b, first_half);
        take<0>(other, rows, rescale);
        wgmma_wait<0>();
        release(a, first_half);
        scale(o, rescale);
        issue_values<0>(o, other, b);
        wgmma_wait<0>();
        release(b, first_half);
      } else {
        wgmma_wait<0>();
        release(a, first_half);
      }
    }
  }

  // The same tiles: warpgroup 1.
  __device__ __forceinline__ void multiply_second(stage_state& stage, output& o, row_pair& rows,
                                                  int tiles, int key) const {
    probabilities own, other;
    float rescale[2];
    if (tiles == 1) arrive_once(q_empty());
    for (int tile = 0; tile < tiles; tile += 2, key += 2 * keys) {
      scores s;
      const stage_state a = stage;
      stage.advance();
      const stage_state b = stage;
      const bool two = tile + 1 < tiles;
      if (two) {
        stage.advance();
        issue_scores(s, b);
      }
      if (two) wgmma_wait<0>();
      take<1>(other, rows, rescale);
      wait_piece(a, second_half);
      if (tile > 0) scale(o, rescale);
      issue_values<1>(o, other, a);
      if (two) {
        if (slabs > latent_slabs) release(b, rotated);
        if (tile + 3 >= tiles) arrive_once(q_empty());
        exponentiate(s, own, rows, key + keys, rescale);
        give<1>(own, rows);
        wgmma_wait<0>();
        release(a, second_half);
        scale(o, rescale);
        issue_values<1>(o, own, b);
        wgmma_wait<0>();
        release(b, second_half);
      } else {
        wgmma_wait<0>();
        release(a, second_half);
      }
    }
  }

  // The sums of a row over both warpgroups' keys, and over the threads that have them.
  template <int half>
  __device__ __forceinline__ void add_sums(row_pair& rows, int tiles) const {
    float sum[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] = rows.softmax[i].sum;
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    }
    // Each warpgroup stores in turn: the second one has not after an odd number of tiles.
    if constexpr (half == 0) {
      if (tiles % 2 == 1) take_floats<0>();
      give_floats<0>(sum[0], sum[1]);
      const float2 whole = take_floats<0>();
      sum[0] = whole.x;
      sum[1] = whole.y;
    } else {
      if (tiles % 2 == 1) give_floats<1>(0.0f, 0.0f);
      const float2 others = take_floats<1>();
      sum[0] += others.x;
      sum[1] += others.y;
      give_floats<1>(sum[0], sum[1]);
    }
    rows.softmax[0].sum = sum[0];
    rows.softmax[1].sum = sum[1];
  }

  // The results of a sequence, or those of a part of one to `words`: four columns of a row at once,
  // of which neighbouring threads have two each.
  template <int half>
  __device__ __forceinline__ void store_rows(int sequence, const rows_of_queries& own,
                                             const output& o, const row_pair& rows,
                                             float* words) const {
    const bool odd = thread() % 2 == 1;
    const int first_column = half * half_rank + (odd ? 8 : 0) + thread() % 4 / 2 * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = own_row() + i * 8;
      const bool valid = row < own.count;
      const float factor =
          words != nullptr ? 1.0f : finish_softmax(rows.softmax[i], minus_infinity()).factor;
      T* const out = static_cast<T*>(p_.out) + own.at(p_, sequence, row) * rank + first_column;
      float* const part = words + row * rank + first_column;
#pragma unroll
      for (int block = 0; block < half_rank / 8; block += 2) {
        const float* const even_block = o + block * 4 + i * 2;
        float4 four;
        {
          const float mine[2] = {odd ? even_block[4] : even_block[0],
                                 odd ? even_block[5] : even_block[1]};
          const float sent[2] = {odd ? even_block[0] : even_block[4],
                                 odd ? even_block[1] : even_block[5]};
          const float got[2] = {__shfl_xor_sync(~0u, sent[0], 1), __shfl_xor_sync(~0u, sent[1], 1)};
          four = odd ? float4{got[0], got[1], mine[0], mine[1]}
                     : float4{mine[0], mine[1], got[0], got[1]};
        }
        if (!valid) continue;
        if (words != nullptr) {
          store_coherent(part + block * 8, four);
        } else {
          *reinterpret_cast<uint2*>(out + block * 8) = uint2{
              pack<T>(four.x * factor, four.y * factor), pack<T>(four.z * factor, four.w * factor)};
        }
      }
    }
  }
  __device__ __forceinline__ void store_softmax(int sequence, const rows_of_queries& own,
                                                const row_pair& rows, float* words) const {
    if (thread() % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = own_row() + i * 8;
      const softmax_row& whole = rows.softmax[i];
      if (row >= own.count) continue;
      if (words != nullptr) {
        store_coherent(words + 64 * rank + row * 2, float2{whole.reference, whole.sum});
      } else {
        store_lse(p_, sequence, own.first + row, finish_softmax(whole, minus_infinity()).lse);
      }
    }
  }

  // Sequences that this group shares with others, its first and its last one at most: in shared
  // memory, since the accumulators need the registers.
  __device__ __forceinline__ void store_cut(int number, const cut_sequence& cut) const {
    store_shared(base_ + plan.cuts_at + number * 16,
                 float4{__int_as_float(cut.index), __int_as_float(cut.first_group),
                        __int_as_float(cut.count), __int_as_float(cut.first_part)});
  }
  __device__ __forceinline__ cut_sequence load_cut(int number) const {
    const float4 words = load_shared(base_ + plan.cuts_at + number * 16);
    return {__float_as_int(words.x), __float_as_int(words.y), __float_as_int(words.z),
            __float_as_int(words.w)};
  }

  template <int half>
  __device__ __forceinline__ void multiply(const tile_division& shares, int begin, int end,
                                           sequence_tile here, const rows_of_queries& own,
                                           int& cuts) const {
    stage_state stage;
    u32 q_phase = 0;
    for (int at = begin;;) {
      const int after = here.before + tile_count(p_, here.index), stop = smaller(after, end);
      const int length = mla_length<form>(p_, here.index);
      row_pair rows;
      rows.common = mla_visible(p_, own.query(p_, 0), length);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        rows.visible[i] = mla_visible(p_, own.query(p_, own_row() + i * 8), length);
      barrier_wait(q_full(), q_phase);
      q_phase ^= 1;
      async_proxy_fence();
      alignas(16) output o = {};
      const int key = (at - here.before) * keys;
      if constexpr (half == 0) {
        multiply_first(stage, o, rows, stop - at, key);
      } else {
        multiply_second(stage, o, rows, stop - at, key);
      }
      add_sums<half>(rows, stop - at);
      at = stop;
      const int first_group = shares.group_of(here.before), last_group = shares.group_of(after - 1);
      const bool is_cut = first_group != last_group;
      float* const words =
          is_cut ? part_of(p_, static_cast<int>(blockIdx.y), here.before > begin ? 1 : 0) : nullptr;
      if constexpr (half == 0) store_softmax(here.index, own, rows, words);
      store_rows<half>(here.index, own, o, rows, words);
      if (is_cut) {
        const cut_sequence cut = {here.index, first_group, last_group - first_group + 1,
                                  shares.begin(first_group) < here.before ? 1 : 0};
        if (half == 0 && thread() == 0) store_cut(cuts, cut);
        ++cuts;
        arrive(p_, cut);
      }
      if (after >= end) break;
      here = {here.index + 1, after};
    }
  }

 public:
  __device__ __forceinline__ mla_sm90_kernel(const mla_sm90_params& p, u32 base)
      : p_(p.mla), map_(p.cache), base_(base) {}

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < config.stages; ++i) {
        const stage_state stage{i, 0};
        for (int slab = 0; slab < slabs; ++slab) {
          barrier_init(full_barrier(stage, slab), 32 * producer_warps);
        }
        for (int piece = 0; piece < plan.pieces; ++piece) {
          barrier_init(empty_barrier(stage, piece), config.cluster);
        }
      }
      barrier_init(q_full(), 32 * producer_warps);
      barrier_init(q_empty(), 2);
      barrier_init_fence();
    }
    if constexpr (config.cluster == 1) {
      __syncthreads();
    } else {
      cluster_barrier();
    }
    wait_and_launch_dependents();
    const tile_division shares = divide(p_);
    const int group = static_cast<int>(blockIdx.y);
    if (group >= shares.groups) return;
    const int begin = shares.begin(group), end = shares.begin(group + 1);
    const sequence_tile here = find(p_, begin);
    rows_of_queries own;
    own.first = static_cast<int>(blockIdx.x) * 64;
    own.count = smaller(64, p_.queries * p_.heads - own.first);
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup == 2) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
      produce(begin, end, here, own);
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
      int cuts = 0;
      if (warpgroup == 0) {
        multiply<0>(shares, begin, end, here, own, cuts);
      } else {
        multiply<1>(shares, begin, end, here, own, cuts);
      }
#pragma unroll 1
      for (int i = 0; i < cuts; ++i) combine(p_, load_cut(i), own);
    }
    if constexpr (config.cluster > 1) {
      // Others of the cluster may still load into this CTA, or release a stage of it.
      __syncwarp();
      cluster_barrier();
    }
  }
};

template <mla_form form, mla_sm90_config config>
__global__ void __launch_bounds__(384, 1) mla_sm90(const __grid_constant__ mla_sm90_params p) {
  extern __shared__ unsigned char shared_memory[];
  const u32 base = (shared_address(shared_memory) + 1023) & ~1023u;  // swizzle atoms
  mla_sm90_kernel<form, config>(p, base).run();
}

}  // namespace fftune
