// The sm_90a attention backward, as three or four launches:
//
//   attention_backward_prepare  (query blocks, heads)  delta, lse in base 2; zeros to dq
//   attention_backward_sm90     key blocks x heads     dk and dv; adds to dq in f32
//   attention_backward_convert  (query blocks, heads)  dq
//   attention_backward_sinks    heads                  d_sinks, where the form has sinks
//
// With `beside` the first has the heads of the first group alone, and the third those of the last
// ones. Idle warps of the second prepare the group after their own, and convert the one two before.
//
// The second: dk and dv of one key block, and its share of dq, for every query block that sees some
// of it: warp-specialised, with TMA and wgmma.
//
// With S = q kᵀ, P = exp2(scale S - lse) and delta = rowsum(d_out * out), of the kernel before:
//
//   dP = d_out vᵀ     dS = P * (dP - delta)     dv += Pᵀ d_out     dk += dSᵀ q     dq += dS k
//
// S and dP are computed transposed, 64 keys to a warpgroup, so that the accumulators of Pᵀ and dSᵀ
// are, packed, the A operands of dv and dk.
//
//   producer warps           shared memory                MMA warpgroups (2 or 3)
//  +----------------------+  +------------------------+  +-------------------------------------+
//  | warp 0  TMA: k, v;   |  | k, v: [slab][keys]     |  | Sᵀ = k qᵀ, dPᵀ = v d_outᵀ           |
//  |   then q | lse and   |->| stages: q | lse        |->| Pᵀ; dv += Pᵀ d_out                  |
//  |   d_out | delta of   |  | stages: d_out | delta  |  | dSᵀ -> registers, shared memory     |
//  |   each query block   |  | dS (and P)             |<-> dqᵀ = kᵀ dSᵀ; dk += dSᵀ q           |
//  | warp 1  dq: TMA adds |<-| dq, f32                |<-| dqᵀ -> shared memory, or red.global |
//  +----------------------+  +------------------------+  +-------------------------------------+
//
// A head's rows lie in slabs of 64 columns: rows of 128 bytes under the 128-byte swizzle. Heads of
// up to 128: each MMA warpgroup has 64 keys of its own. Wider ones, whose gradients would not fit
// its registers: the key block has 64 keys, the warpgroups split queries for S and dP, columns for
// dk and dv, and P goes through shared memory, too.
//
// With `ahead` S of the next query block is begun before dq of this one is stored, so that the
// tensor cores have work while the warps have theirs.
//
//  barrier            arrivals that complete a phase      who waits
//  k, v               their bytes                         MMA warpgroups
//  q full[stage]      the bytes of q and lse              MMA warpgroups
//  q empty[stage]     each MMA warp: dk is done           warp 0
//  d_out full, empty  the same; dv is done                the same
//  dq full[group]     each warp of an MMA warpgroup       warp 1
//  dq empty[group]    warp 1: the stage of dq is read     the MMA warpgroup
//
// A stage of q also says which query block it has: the producer alone decides what is visited.
#include "attention/sm90/backward_rows.cuh"
#include "attention/sm90/backward_work.cuh"
#include "attention/sm90/value_widths.cuh"
#include "attention/softmax.cuh"
#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/numerics.cuh"
#include "common/vectors.cuh"

namespace fftune {

__device__ __forceinline__ void add_global(float* address, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Orders what was written to global memory before, by generic stores or by TMA, and what is after.
__device__ __forceinline__ void fence_global_async() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Named barriers.
enum class backward_barrier {
  scores = 1,     // the MMA warpgroups: around P and dS in shared memory
  warpgroup = 2,  // + MMA warpgroup: its threads
  beside = 5      // the idle warps of the producers
};

__device__ __forceinline__ int load_acquired(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Behind a barrier of those whose writes it releases, each of whom has a fence before it.
__device__ __forceinline__ void count_released(int* address) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(address) : "memory");
}

template <attention_form form, sm90_backward_config config>
struct attention_backward {
  using T = element_type<form.type>;
  using work_type = key_block_work<form, config>;
  static constexpr sm90_backward_plan plan = sm90_backward_plan_of(form, config);
  static_assert(sm90_backward_misfit(form, config) == nullptr);
  static constexpr int bm = config.bm, bn = config.bn, warpgroups = config.mma_warpgroups;
  static constexpr int mma_threads = warpgroups * 128;
  static constexpr bool splits_dim = plan.splits_dim;
  static constexpr int score_columns = plan.score_columns, score_values = score_columns / 2;
  static constexpr int score_steps = score_columns / 16;  // of stmatrix, or of 16 k of dk and dv
  static constexpr int gradient_columns = plan.gradient_columns;
  static constexpr int gradient_values = gradient_columns / 2;
  static constexpr int dq_values = plan.dq_columns / 2;
  static constexpr bool stages_dq = config.dq == dq_path::bulk;

  using q_ring = pipeline<config.q_stages, plan.q_bytes>;
  using do_ring = pipeline<config.do_stages, plan.q_bytes>;

  const sm90_backward_params& params;
  const attention_params& attention;
  u32 base;  // of shared memory
  const work_type work;

  __device__ __forceinline__ u32 k_full() const { return base + plan.barriers_at; }
  __device__ __forceinline__ u32 v_full() const { return base + plan.barriers_at + 8; }
  __device__ __forceinline__ q_ring q_blocks() const {
    const u32 full = base + plan.barriers_at + 16;
    return {base + plan.q_at, full, full + config.q_stages * 8};
  }
  __device__ __forceinline__ do_ring do_blocks() const {
    const u32 full = base + plan.barriers_at + 16 + config.q_stages * 16;
    return {base + plan.do_at, full, full + config.do_stages * 8};
  }

  // A query block of a head; with block < 0: there is none any more.
  struct visit {
    int block, head;
    bool sees_all;  // every query that exists sees every key
  };
  static __device__ __forceinline__ void store_visit(u32 at, const visit& visit) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(visit.block),
                 "r"(visit.head * 2 + visit.sees_all)
                 : "memory");
  }
  static __device__ __forceinline__ visit load_visit(u32 at) {
    int block, rest;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(block), "=r"(rest) : "r"(at) : "memory");
    return {block, rest >> 1, (rest & 1) != 0};
  }
  __device__ __forceinline__ u32 visit_at(const q_ring& q) const {
    return base + plan.visits_at + q.index * 16;
  }

  static __device__ __forceinline__ void sync(backward_barrier barrier, int threads,
                                              int warpgroup = 0) {
    named_barrier_sync(static_cast<int>(barrier) + warpgroup, threads);
  }

  __device__ __forceinline__ int query_blocks() const { return params.padded_rows / bm; }
  __device__ __forceinline__ i64 stats_at(const visit& visit) const {
    return static_cast<i64>(visit.head) * params.padded_rows + work.first_rows + visit.block * bm;
  }
  // Whether every pair of it exists and is visible: no element is masked, and no query is padding.
  __device__ __forceinline__ bool is_full(const visit& visit) const {
    return visit.sees_all && (visit.block + 1) * bm <= work.sequence.q_len;
  }
  // Number of a query block of a head, among all.
  __device__ __forceinline__ i64 number(const visit& visit) const {
    return static_cast<i64>(visit.head) * query_blocks() + work.first_rows / bm + visit.block;
  }

  // --- Warps of the producers that have no other work: heads before and after this one ---

  __device__ __forceinline__ int key_blocks() const {
    return sm90_backward_key_blocks(form, 1, attention.kv_len, bn);
  }
  __device__ __forceinline__ int matrix() const {
    return work.sequence.index * attention.kv_heads + work.kv_head;
  }

  // Calls run(query block, head) for the CTA's share of the queries of a head of k and v.
  template <class Run>
  static __device__ __forceinline__ void for_share(const attention_params& attention,
                                                   const beside_work<form, config>& own, int matrix,
                                                   const Run& run) {
    const int heads = attention.heads / attention.kv_heads, blocks = ceil_div(attention.q_len, bm);
    const int first_block = matrix / attention.kv_heads * blocks;
    const int first_head = matrix % attention.kv_heads * heads;
    const int last = own.first_of(own.part + 1, blocks * heads);
    for (int i = own.first_of(own.part, blocks * heads); i < last; ++i) {
      run(first_block + i % blocks, first_head + i / blocks);
    }
  }

  static __device__ __forceinline__ void work_beside(const sm90_backward_params& params) {
    constexpr int warps = 4 - plan.busy_warps, threads = warps * 32;
    const int thread = static_cast<int>(threadIdx.x) % 128 - plan.busy_warps * 32;
    const beside_work<form, config> own(params.attention);
    using preparation = backward_preparation<form, config, threads, 1>;
    wait_for_dependencies();
    if (own.next >= 0) {
      for_share(params.attention, own, own.next,
                [&](int block, int head) { preparation::prefetch(params, block, head, thread); });
      for_share(params.attention, own, own.next,
                [&](int block, int head) { preparation::run(params, block, head, thread); });
      __threadfence();
      sync(backward_barrier::beside, threads);
      if (thread == 0) count_released(params.prepared + own.next);
    }
    if (own.previous >= 0) {
      while (load_acquired(params.finished + own.previous) != own.parts) __nanosleep(200);
      for_share(params.attention, own, own.previous, [&](int block, int head) {
        backward_conversion<form, config>(params, block, head)
            .run_beside(params, thread / 32, warps);
      });
    }
  }

  // Waits for what the kernel before or CTAs of other heads have written: delta, the log-sum-exp
  // and dq's zeros. For reads and sums by TMA, too.
  __device__ __forceinline__ void wait_until_prepared() const {
    wait_for_dependencies();
    if constexpr (config.beside) {
      if (static_cast<int>(blockIdx.x) >= attention.group * key_blocks()) {
        while (load_acquired(params.prepared + matrix()) != key_blocks()) __nanosleep(100);
      }
    }
    fence_global_async();
  }

  // --- Warp 0 of the producers ---

  // Rows of a sequence, which has `rows` in the tensor.
  __device__ __forceinline__ void load_rows(u32 to, const tensor_map& map, u32 barrier, int head,
                                            int row, int rows, int slab_bytes) const {
    const int sequence = form.packed_sequences() ? 0 : work.sequence.index;
#pragma unroll
    for (int slab = 0; slab < plan.slabs; ++slab) {
      if constexpr (plan.head_boxes) {
        tma_load(to + slab * slab_bytes, map, barrier, slab * 64, head, sequence * rows + row,
                 l2_policy::evict_normal);
      } else {
        tma_load(to + slab * slab_bytes, map, barrier, head * plan.head_pitch + slab * 64, row,
                 sequence, l2_policy::evict_normal);
      }
    }
  }

  __device__ __forceinline__ void load_block(q_ring& q, do_ring& d_out, const visit& visit) const {
    const int row = work.sequence.q_first + visit.block * bm;
    q.wait_empty();
    store_visit(visit_at(q), visit);
    barrier_arrive_expect(q.full_barrier(), plan.q_bytes + bm * 4);
    load_rows(q.buffer(), params.q, q.full_barrier(), visit.head, row, attention.q_len,
              plan.q_slab_bytes);
    bulk_load(base + plan.lse_at + q.index * bm * 4, params.lse_log2 + stats_at(visit), bm * 4,
              q.full_barrier());
    q.advance();
    d_out.wait_empty();
    barrier_arrive_expect(d_out.full_barrier(), plan.q_bytes + bm * 4);
    load_rows(d_out.buffer(), params.d_out, d_out.full_barrier(), visit.head, row, attention.q_len,
              plan.q_slab_bytes);
    bulk_load(base + plan.delta_at + d_out.index * bm * 4, attention.delta + stats_at(visit),
              bm * 4, d_out.full_barrier());
    d_out.advance();
  }

  __device__ __forceinline__ void load() const {
    const int lane = threadIdx.x % 32;
    q_ring q = q_blocks();
    do_ring d_out = do_blocks();
    if (lane == 0 && work.first < work.last) {
      const int row = work.sequence.kv_first + work.first_key;
      barrier_arrive_expect(k_full(), plan.kv_bytes);
      const int rows = attention.kv_len;
      load_rows(base + plan.k_at, params.k, k_full(), work.kv_head, row, rows, plan.kv_slab_bytes);
      barrier_arrive_expect(v_full(), plan.kv_bytes);
      load_rows(base + plan.v_at, params.v, v_full(), work.kv_head, row, rows, plan.kv_slab_bytes);
    }
    wait_until_prepared();
    const int heads = attention.heads / attention.kv_heads;
    for (int head = work.kv_head * heads; head < (work.kv_head + 1) * heads; ++head) {
      for (int from = work.first; from < work.last; from += 32) {
        const int own = from + lane;
        const int flag = own < work.last ? work.flag(attention, head, own) : tile_empty;
        u32 visited = __ballot_sync(~0u, flag != tile_empty);
        const u32 full = __ballot_sync(~0u, flag == tile_full);
        if (lane == 0) {
          for (; visited != 0; visited &= visited - 1) {
            const int next = __ffs(static_cast<int>(visited)) - 1;
            load_block(q, d_out, {from + next, head, (full >> next & 1) != 0});
          }
        }
        __syncwarp();
      }
    }
    if (lane == 0) {
      q.wait_empty();
      store_visit(visit_at(q), {-1, 0, false});
      barrier_arrive(q.full_barrier());
    }
  }

  // --- The turns of the deterministic form: key blocks add to a query block in their order ---

  __device__ __forceinline__ int* turn_of(const visit& visit, int warpgroup) const {
    return params.turns + number(visit) * warpgroups + warpgroup;
  }
  __device__ __forceinline__ void wait_turn(const visit& visit, int warpgroup) const {
    if (!work.in_turns) return;
    const int* const at = turn_of(visit, warpgroup);
    const int turn = work.turn(attention, visit.block);
    while (load_acquired(at) != turn) {
    }
  }
  __device__ __forceinline__ void end_turn(const visit& visit, int warpgroup) const {
    __threadfence();
    count_released(turn_of(visit, warpgroup));
  }

  // --- Warp 1 of the producers: has TMA add the warpgroups' dq to memory ---

  // A stage of dq of each MMA warpgroup; `buffer` gives its visit.
  using dq_stage = pipeline<1, 0>;
  __device__ __forceinline__ dq_stage dq_stage_of(int warpgroup) const {
    const u32 visit = base + plan.dq_visits_at + warpgroup * plan.dq_visit_bytes;
    return {visit, visit + 8, visit + 16};
  }
  __device__ __forceinline__ float* dq_of(const visit& visit, int warpgroup) const {
    return attention.dq_partials + number(visit) * plan.dq_words + warpgroup * plan.dq_share;
  }
  // Bytes of a warpgroup's dq: of columns behind a head there are none.
  static __device__ __forceinline__ int dq_bytes_of(int warpgroup) {
    return smaller(plan.dq_share, plan.dq_words - warpgroup * plan.dq_share) * 4;
  }
  // The threads of a warpgroup that have columns of a head in one of its tiles of dq: the first.
  static __device__ __forceinline__ int dq_threads(int warpgroup, int tile) {
    const int slab = plan.splits_dq_rows ? tile : warpgroup * plan.dq_tiles + tile;
    return plan.last_dq_threads == 128 || slab + 1 < plan.slabs ? 128 : plan.last_dq_threads;
  }

  // One thread.
  __device__ __forceinline__ void add_dq_stages() const {
    wait_until_prepared();
    u32 phase = 0;
    for (bool any = true; any; phase ^= 1) {
#pragma unroll
      for (int warpgroup = 0; warpgroup < warpgroups; ++warpgroup) {
        const dq_stage stage = dq_stage_of(warpgroup);
        barrier_wait(stage.full, phase);
        const visit now = load_visit(stage.buffers);
        if (now.block < 0) {
          any = false;  // the warpgroups visit the same blocks: the others end in this round, too
          continue;
        }
        if constexpr (form.deterministic) {
          wait_turn(now, warpgroup);
          fence_global_async();
        }
        bulk_add(dq_of(now, warpgroup), base + plan.dq_at + warpgroup * plan.dq_bytes,
                 dq_bytes_of(warpgroup));
        tma_store_commit();
        if constexpr (form.deterministic) {
          tma_store_wait<0>();
          fence_global_async();
          end_turn(now, warpgroup);
        } else {
          tma_store_wait_read<0>();
        }
        barrier_arrive(stage.empty);
      }
    }
    tma_store_wait<0>();
    if constexpr (config.beside) {
      fence_global_async();
      __threadfence();
      count_released(params.finished + matrix());
    }
  }

  // --- MMA warpgroups ---

  using scores = float[score_values];
  using fragments = u32[score_steps][4];
  using gradient = float[gradient_values];
  using dq_tiles = float[plan.dq_tiles][dq_values];

  // Accumulators that the next MMA overwrites hold nothing: to the compiler their registers would
  // else be in use, or need a value, which serialises the MMAs.
  template <int values>
  static __device__ __forceinline__ void forget(float (&c)[values]) {
#pragma unroll
    for (int i = 0; i < values; ++i) asm volatile("" : "=f"(c[i]));
  }

  // Sᵀ or dPᵀ: 64 rows of k or v times rows of q or d_out.
  __device__ __forceinline__ void multiply_scores(scores& c, int keys_at, u32 queries,
                                                  int warpgroup) const {
    const u64 a = wgmma_descriptor(base + keys_at + (splits_dim ? 0 : warpgroup * 64 * 128));
    const u64 b = wgmma_descriptor(queries + (splits_dim ? warpgroup * score_columns * 128 : 0));
    forget(c);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < plan.score_k_steps; ++step) {
      const int slab = step / 4, in_slab = step % 4 * 2;
      wgmma<T, score_columns>(c, a + (slab * plan.kv_slab_bytes >> 4) + in_slab,
                              b + (slab * plan.q_slab_bytes >> 4) + in_slab, step > 0);
    }
    wgmma_commit();
  }

  // dv += Pᵀ d_out or dk += dSᵀ q. Pᵀ or dSᵀ: this thread's fragments, or at `at`.
  __device__ __forceinline__ void multiply_gradient(gradient& c, const fragments& own, u32 at,
                                                    u32 queries, int accumulate,
                                                    int warpgroup) const {
    const int first_slab = splits_dim ? warpgroup * gradient_columns / 64 : 0;
    const u64 b =
        wgmma_swizzled_descriptor<128, plan.q_slab_bytes>(queries + first_slab * plan.q_slab_bytes);
    wgmma_fence();
    if constexpr (splits_dim) {
      const u64 a = wgmma_descriptor(at);
#pragma unroll
      for (int step = 0; step < bm / 16; ++step) {
        wgmma<T, gradient_columns, false, true>(
            c, a + (step / 4 * wgmma_slab_bytes >> 4) + step % 4 * 2, b + step * 128,
            step > 0 || accumulate);
      }
    } else {
#pragma unroll
      for (int step = 0; step < bm / 16; ++step) {
        multiply_by_values<T, gradient_columns>(c, own[step], b + step * 128,
                                                step > 0 || accumulate);
      }
    }
    wgmma_commit();
  }

  // dqᵀ = kᵀ dSᵀ: 64 columns of a head times queries.
  __device__ __forceinline__ void multiply_dq(dq_tiles& c, u32 ds, int warpgroup) const {
#pragma unroll
    for (int tile = 0; tile < plan.dq_tiles; ++tile) forget(c[tile]);
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < plan.dq_tiles; ++tile) {
      const int slab = plan.splits_dq_rows ? tile : warpgroup * plan.dq_tiles + tile;
      const int first_query = plan.splits_dq_rows ? warpgroup * plan.dq_columns : 0;
      const u64 a = wgmma_transposed_descriptor(base + plan.k_at + slab * plan.kv_slab_bytes);
#pragma unroll
      for (int step = 0; step < bn / 16; ++step) {
        if constexpr (splits_dim) {
          wgmma<T, plan.dq_columns, true, true>(
              c[tile], a + step * 128, wgmma_transposed_descriptor(ds) + step * 128, step > 0);
        } else {
          const u64 b = wgmma_descriptor(ds + first_query * 128);
          wgmma<T, plan.dq_columns, true>(c[tile], a + step * 128,
                                          b + (step / 4 * bm * 128 >> 4) + step % 4 * 2, step > 0);
        }
      }
    }
    wgmma_commit();
  }

  // The first key of this thread's scores, in the tile; the other is 8 later.
  static __device__ __forceinline__ int own_key(int warpgroup) {
    const int thread = threadIdx.x % 128;
    return (splits_dim ? 0 : warpgroup * 64) + thread / 32 * 16 + thread % 32 / 4;
  }

  // Scores to probabilities, in place; to fragments, too. With a soft cap the probabilities are
  // then multiplied by the cap's derivative, which dS needs.
  template <bool masked>
  __device__ __forceinline__ void probabilities(scores& s, fragments& p, const visit& visit,
                                                u32 lse, int warpgroup) const {
    const int first_column = splits_dim ? warpgroup * score_columns : 0;
    const int own_column = threadIdx.x % 4 * 2;
    const int query = visit.block * bm + first_column + own_column;  // in the sequence
    const int key = work.first_key + own_key(warpgroup);
    const float factor = form.softcap ? attention.softcap * log2_e : attention.scale * log2_e;
    const float inner = form.softcap ? attention.scale / attention.softcap : 1.0f;
    // Queries [first, last] of this tile see a key.
    int first[2] = {0, 0}, last[2] = {bm, bm};
    if constexpr (masked) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        last[i] = work.sequence.q_len - 1 - query;
        const int diagonal = key + 8 * i - work.sequence.shift() - query;
        if constexpr (form.mask == attention_mask::causal) first[i] = diagonal;
        if constexpr (form.window) last[i] = smaller(last[i], diagonal + attention.window - 1);
        if (key + 8 * i >= work.sequence.kv_len) last[i] = -1;
      }
    }
    const u32* bits = nullptr;
    int words = 0;
    if constexpr (masked && form.mask == attention_mask::packed) {
      const packed_mask mask(attention, work.sequence.index, visit.head);
      words = mask.words;
      bits = mask.bits + smaller(key / 32, words - 1);
    }
    const T* bias = nullptr;
    if constexpr (form.bias) {
      bias = static_cast<const T*>(attention.bias) + work.sequence.index * attention.bias_batch +
             visit.head * attention.bias_head;
    }
#pragma unroll
    for (int step = 0; step < score_steps; ++step) {
      float derivative[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = step * 16 + half * 8;
        const float2 row_lse = load_shared_pair(lse + (first_column + own_column + column) * 4);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          u32 word = 0;
          if constexpr (masked && form.mask == attention_mask::packed) {
            const int row = smaller(query + column + j, work.sequence.q_len - 1);
            word = bits[static_cast<i64>(row) * words] >> key % 32;
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& value = s[step * 8 + half * 4 + i * 2 + j];
            if constexpr (form.softcap) {
              value = tanh_by_exp2(value * inner);
              derivative[half * 4 + i * 2 + j] = 1.0f - value * value;
            }
            float exponent = value * factor;
            if constexpr (form.bias) {
              const int row = smaller(query + column + j, work.sequence.q_len - 1);
              const int column_of_key = smaller(key + 8 * i, work.sequence.kv_len - 1);
              exponent +=
                  to_float(bias[static_cast<i64>(row) * attention.bias_row + column_of_key]) *
                  log2_e;
            }
            value = approximate_exp2(exponent - (j == 0 ? row_lse.x : row_lse.y));
            if constexpr (masked) {
              bool seen = column + j >= first[i] && column + j <= last[i];
              if constexpr (form.mask == attention_mask::packed) seen &= (word >> 8 * i & 1) != 0;
              if (!seen) {
                value = masked_probability;
                if constexpr (form.softcap) derivative[half * 4 + i * 2 + j] = 1.0f;
              }
            }
          }
        }
      }
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        p[step][pair] = pack<T>(s[step * 8 + pair * 2], s[step * 8 + pair * 2 + 1]);
      }
      if constexpr (form.softcap) {
#pragma unroll
        for (int i = 0; i < 8; ++i) s[step * 8 + i] *= derivative[i];
      }
    }
  }

  // dS from P and dP, as fragments.
  template <bool masked>
  __device__ __forceinline__ void score_gradients(const scores& p, const scores& dp, fragments& ds,
                                                  u32 delta, int warpgroup) const {
    const u32 own =
        delta + ((splits_dim ? warpgroup * score_columns : 0) + threadIdx.x % 4 * 2) * 4;
#pragma unroll
    for (int step = 0; step < score_steps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 row_delta = load_shared_pair(own + (step * 16 + half * 8) * 4);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int i = step * 8 + half * 4 + row * 2;
          const float x = dp[i] - row_delta.x, y = dp[i + 1] - row_delta.y;
          ds[step][half * 2 + row] =
              masked ? pack<T>(score_gradient(p[i], x), score_gradient(p[i + 1], y))
                     : pack<T>(p[i] * x, p[i + 1] * y);
        }
      }
    }
  }

  // Pᵀ or dSᵀ to shared memory. Keys of each warpgroup in a slab [queries][64 keys], or, where the
  // warpgroups split the queries, slabs [64 keys][64 queries].
  static __device__ __forceinline__ void store_scores(u32 at, const fragments& values,
                                                      int warpgroup) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int matrix = lane / 8, row = lane % 8;
    if constexpr (splits_dim) {
      const int key = warp * 16 + matrix % 2 * 8 + row;
#pragma unroll
      for (int step = 0; step < score_steps; ++step) {
        const int chunk = (warpgroup * score_columns + step * 16) / 8 + matrix / 2;
        store_matrices<false>(
            at + chunk / 8 * wgmma_slab_bytes + key * 128 + ((chunk % 8 ^ row) << 4), values[step]);
      }
    } else {
      const u32 own = at + warpgroup * bm * 128 + (matrix / 2 * 8 + row) * 128 +
                      (((warp * 2 + matrix % 2) ^ row) << 4);
#pragma unroll
      for (int step = 0; step < score_steps; ++step) {
        store_matrices<true>(own + step * 16 * 128, values[step]);
      }
    }
  }

  // Passes this warpgroup's stage of dq to the dq warp, with the visit that it is of.
  __device__ __forceinline__ void pass_dq(dq_stage& stage, const visit& visit) const {
    if (threadIdx.x % 128 == 0) store_visit(stage.buffers, visit);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(stage.full);
    stage.advance();
  }

  // Calls store(at, four accumulators) for those of this thread that are columns of a head; at: 16
  // bytes from this thread's first.
  template <class Store>
  static __device__ __forceinline__ void for_dq(const dq_tiles& dq, int warpgroup,
                                                const Store& store) {
    constexpr int vectors = dq_values / 4;
#pragma unroll
    for (int tile = 0; tile < plan.dq_tiles; ++tile) {
      const int threads = dq_threads(warpgroup, tile);
      if (plan.last_dq_threads < 128 && static_cast<int>(threadIdx.x % 128) >= threads) continue;
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        const float* const from = dq[tile] + i * 4;
        store(tile * vectors * 128 + i * threads, from[0], from[1], from[2], from[3]);
      }
    }
  }

  // Adds to dq in memory. Where a thread's four neighbouring accumulators lie there is known to the
  // kernel that converts dq, dq_fragment in backward_rows.cuh.
  __device__ __forceinline__ void add_dq(const dq_tiles& dq, const visit& visit, dq_stage& stage,
                                         int warpgroup) const {
    const int thread = threadIdx.x % 128;
    if constexpr (stages_dq) {
      stage.wait_empty();
      const u32 own = base + plan.dq_at + warpgroup * plan.dq_bytes + thread * 16;
      for_dq(dq, warpgroup, [&](int at, float a, float b, float c, float d) {
        store_shared(own + at * 16, make_float4(a, b, c, d));
      });
      async_proxy_fence();
      pass_dq(stage, visit);
    } else {
      if constexpr (form.deterministic) {
        if (thread == 0) wait_turn(visit, warpgroup);
        sync(backward_barrier::warpgroup, 128, warpgroup);
      }
      float* const own = dq_of(visit, warpgroup) + thread * 4;
      for_dq(dq, warpgroup, [&](int at, float a, float b, float c, float d) {
        add_global(own + at * 4, a, b, c, d);
      });
      if constexpr (form.deterministic) {
        __threadfence();
        sync(backward_barrier::warpgroup, 128, warpgroup);
        if (thread == 0) end_turn(visit, warpgroup);
      }
    }
  }

  // Overwrites rows of a tile in shared memory from `count` on with zeros: what follows a sequence
  // may hold NaN, which a probability of zero does not cancel. All MMA warpgroups.
  template <int rows>
  static __device__ __forceinline__ void zero_rows(u32 at, int count) {
    const int vectors = (rows - count) * 8;  // of a slab
    for (int i = threadIdx.x; i < plan.slabs * vectors; i += mma_threads) {
      const int slab = i / vectors;
      store_shared(at + slab * rows * 128 + count * 128 + (i - slab * vectors) * 16,
                   make_float4(0, 0, 0, 0));
    }
  }
  __device__ __forceinline__ void zero_keys() const {
    const int count = work.sequence.kv_len - work.first_key;
    if (!(form.foreign_keys() || plan.head_boxes) || count >= bn) return;
    barrier_wait(v_full(), 0);
    zero_rows<bn>(base + plan.k_at, count);
    zero_rows<bn>(base + plan.v_at, count);
    async_proxy_fence();
    sync(backward_barrier::scores, mma_threads);
  }
  __device__ __forceinline__ void zero_queries(u32 at, const visit& visit) const {
    const int count = work.sequence.q_len - visit.block * bm;
    if (!(form.packed_sequences() || plan.head_boxes) || count >= bm) return;
    zero_rows<bm>(at, count);
    async_proxy_fence();
    sync(backward_barrier::scores, mma_threads);
  }

  // This thread's arrival: its reads and its MMAs' of the stage are complete. Every lane arrives,
  // as each has read what generic stores and bulk copies wrote there.
  static __device__ __forceinline__ void release(u32 barrier) {
    barrier_arrive(barrier);
  }

  // Waits for the next stage of q.
  __device__ __forceinline__ visit next_visit(const q_ring& q) const {
    q.wait_full();
    const visit next = load_visit(visit_at(q));
    if (next.block >= 0) zero_queries(q.buffer(), next);
    return next;
  }

  // Register state between S and dS.
  struct query_state {
    scores s, dp;  // S, then P; and dP
    fragments p;   // Pᵀ
  };

  // From S, which with `ahead` is complete and else under way, to P and dP, with dv begun where P
  // is in registers.
  __device__ __forceinline__ void begin_block(query_state& state, gradient& dv, const visit& now,
                                              const do_ring& d_out, u32 lse, int more,
                                              int warpgroup) const {
    d_out.wait_full();
    zero_queries(d_out.buffer(), now);
    multiply_scores(state.dp, plan.v_at, d_out.buffer(), warpgroup);
    if constexpr (!config.ahead) wgmma_wait<1>();  // S
    if (is_full(now)) {
      probabilities<false>(state.s, state.p, now, lse, warpgroup);
    } else {
      probabilities<true>(state.s, state.p, now, lse, warpgroup);
    }
    if constexpr (splits_dim) {
      wgmma_wait<0>();  // dP
    } else {
      multiply_gradient(dv, state.p, 0, d_out.buffer(), more, warpgroup);
      wgmma_wait<1>();
    }
  }

  __device__ __forceinline__ u32 lse_at(const q_ring& q) const {
    return base + plan.lse_at + q.index * bm * 4;
  }

  __device__ __forceinline__ void compute(int warpgroup) const {
    gradient dk, dv;
    forget(dk);
    forget(dv);
    q_ring q = q_blocks();
    do_ring d_out = do_blocks();
    query_state state;
    int more = 0;      // 1: dk and dv have been begun
    u32 ds_stage = 0;  // in bytes
    dq_stage dq_to = dq_stage_of(warpgroup);
    if constexpr (!stages_dq) wait_until_prepared();
    visit now = next_visit(q);
    if (now.block >= 0) {
      barrier_wait(k_full(), 0);
      zero_keys();
      barrier_wait(v_full(), 0);
    }
    if constexpr (config.ahead) {
      multiply_scores(state.s, plan.k_at, q.buffer(), warpgroup);
      wgmma_wait<0>();
    }
    while (now.block >= 0) {
      const u32 q_buffer = q.buffer(), q_empty = q.empty_barrier();
      if constexpr (!config.ahead) multiply_scores(state.s, plan.k_at, q_buffer, warpgroup);
      begin_block(state, dv, now, d_out, lse_at(q), more, warpgroup);
      fragments ds;
      const u32 delta_at = base + plan.delta_at + d_out.index * bm * 4;
      if (is_full(now)) {
        score_gradients<false>(state.s, state.dp, ds, delta_at, warpgroup);
      } else {
        score_gradients<true>(state.s, state.dp, ds, delta_at, warpgroup);
      }

      // With one stage: the MMAs of the last query block have read it.
      if constexpr (config.ds_stages == 1) sync(backward_barrier::scores, mma_threads);
      const u32 p_at = base + plan.p_at + ds_stage, ds_at = base + plan.ds_at + ds_stage;
      if constexpr (splits_dim) store_scores(p_at, state.p, warpgroup);
      store_scores(ds_at, ds, warpgroup);
      async_proxy_fence();
      sync(backward_barrier::scores, mma_threads);
      if constexpr (config.ds_stages == 2) ds_stage ^= plan.score_bytes;

      if constexpr (splits_dim) {
        multiply_gradient(dv, state.p, p_at, d_out.buffer(), more, warpgroup);
      } else {
        wgmma_wait<0>();  // dv, whose fragments' registers are needed
        release(d_out.empty_barrier());
        d_out.advance();
      }
      dq_tiles dq;
      multiply_dq(dq, ds_at, warpgroup);
      multiply_gradient(dk, ds, ds_at, q_buffer, more, warpgroup);
      more = 1;
      q.advance();
      visit next = now;
      if constexpr (config.ahead) {
        // After the last block, of whatever lies there: a branch would serialise the MMAs.
        next = next_visit(q);
        multiply_scores(state.s, plan.k_at, q.buffer(), warpgroup);
      }
      if constexpr (splits_dim) {
        wgmma_wait<config.ahead ? 3 : 2>();  // dv
        release(d_out.empty_barrier());
        d_out.advance();
      }
      wgmma_wait<config.ahead ? 2 : 1>();
      add_dq(dq, now, dq_to, warpgroup);
      wgmma_wait<config.ahead ? 1 : 0>();  // dk
      release(q_empty);
      if constexpr (config.ahead) {
        // S: were it under way across a branch, the compiler would serialise the MMAs.
        wgmma_wait<0>();
      } else {
        next = next_visit(q);
      }
      now = next;
    }
    if (more == 0) {
#pragma unroll
      for (int i = 0; i < gradient_values; ++i) dk[i] = dv[i] = 0.0f;
    }
    if constexpr (stages_dq) {
      dq_to.wait_empty();
      pass_dq(dq_to, {-1, 0, false});
    }
    if (work.first < work.last) {  // also where no block was visited
      barrier_wait(k_full(), 0);
      barrier_wait(v_full(), 0);
    }
    if constexpr (config.beside && !stages_dq) __threadfence();  // behind its sums of dq
    sync(backward_barrier::scores, mma_threads);                 // k and v are read no more
    if constexpr (config.beside && !stages_dq) {
      if (threadIdx.x == 0) count_released(params.finished + matrix());
    }
    stage_gradient(dk, plan.k_at, attention.scale, warpgroup);
    stage_gradient(dv, plan.v_at, 1.0f, warpgroup);
    sync(backward_barrier::warpgroup, 128, warpgroup);
    const i64 row = work.sequence.kv_first + work.first_key;
    const i64 sequence = form.packed_sequences() ? 0 : work.sequence.index;
    store_gradient(static_cast<T*>(attention.dk) + sequence * params.dk_batch + row * params.dk_row,
                   params.dk_row, plan.k_at, warpgroup);
    store_gradient(static_cast<T*>(attention.dv) + sequence * params.dv_batch + row * params.dv_row,
                   params.dv_row, plan.v_at, warpgroup);
  }

  // Where a warpgroup's share of dk or dv lies in the place of k or v.
  __device__ __forceinline__ u32 gradient_at(int at, int warpgroup) const {
    return base + at +
           (splits_dim ? warpgroup * gradient_columns / 64 * plan.kv_slab_bytes
                       : warpgroup * 64 * 128);
  }

  __device__ __forceinline__ void stage_gradient(const gradient& values, int at, float factor,
                                                 int warpgroup) const {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int row = warp * 16 + lane % 16;
    const u32 own = gradient_at(at, warpgroup) + row * 128;
#pragma unroll
    for (int step = 0; step < gradient_columns / 16; ++step) {
      u32 words[4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        words[pair] =
            pack<T>(values[step * 8 + pair * 2] * factor, values[step * 8 + pair * 2 + 1] * factor);
      }
      const int chunk = step % 4 * 2 + lane / 16;
      store_matrices<false>(own + step / 4 * plan.kv_slab_bytes + ((chunk ^ (row & 7)) << 4),
                            words);
    }
  }

  __device__ __forceinline__ void store_gradient(T* to, int row_elements, int at,
                                                 int warpgroup) const {
    // The last warpgroup may store fewer of a row.
    constexpr int vectors = (splits_dim ? gradient_columns : form.dim + 7) / 8;
    const int first_row = splits_dim ? 0 : warpgroup * 64;
    const int first_column =
        work.kv_head * form.dim + (splits_dim ? warpgroup * gradient_columns : 0);
    const int rows = smaller(64, work.kv_rows - work.first_key - first_row);
    for (int i = threadIdx.x % 128; i < rows * vectors; i += 128) {
      const int row = i / vectors, chunk = i % vectors;
      const float4 value = load_shared(gradient_at(at, warpgroup) + chunk / 8 * plan.kv_slab_bytes +
                                       row * 128 + ((chunk % 8 ^ (row & 7)) << 4));
      store_features<form.dim, !splits_dim || plan.slabs * 64 == form.dim>(
          to + static_cast<i64>(first_row + row) * row_elements + first_column + chunk * 8,
          (splits_dim ? warpgroup * gradient_columns : 0) + chunk * 8, value);
    }
  }

  // --- All threads ---

  __device__ __forceinline__ void init_barriers() const {
    barrier_init(k_full(), 1);
    barrier_init(v_full(), 1);
    const q_ring q = q_blocks();
    for (int stage = 0; stage < config.q_stages; ++stage) {
      barrier_init(q.full + stage * 8, 1);
      barrier_init(q.empty + stage * 8, mma_threads);
    }
    const do_ring d_out = do_blocks();
    for (int stage = 0; stage < config.do_stages; ++stage) {
      barrier_init(d_out.full + stage * 8, 1);
      barrier_init(d_out.empty + stage * 8, mma_threads);
    }
    if constexpr (stages_dq) {
      for (int warpgroup = 0; warpgroup < warpgroups; ++warpgroup) {
        const dq_stage stage = dq_stage_of(warpgroup);
        barrier_init(stage.full, 4);
        barrier_init(stage.empty, 1);
      }
    }
    barrier_init_fence();
  }

  static __device__ __forceinline__ void run(const sm90_backward_params& params,
                                             unsigned char* memory) {
    const u32 base = (shared_address(memory) + 1023) & ~1023u;  // swizzle atoms are 1024 bytes
    const attention_backward self{params, params.attention, base,
                                  work_type(params.attention, static_cast<int>(blockIdx.x))};
    if (self.work.first_key >= self.work.kv_rows) return;  // thd: a block that is nobody's
    if (threadIdx.x == 0) self.init_barriers();
    __syncthreads();
    launch_dependents();
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup == warpgroups) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(int{plan.producer_registers}));
      const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) % 128 / 32, 0);
      if (warp == 0) self.load();
      if constexpr (stages_dq) {
        if (warp == 1 && threadIdx.x % 32 == 0) self.add_dq_stages();
      }
      if constexpr (config.beside) {
        if (warp >= plan.busy_warps) work_beside(params);
      }
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(int{plan.mma_registers}));
      self.compute(warpgroup);
    }
  }
};

template <attention_form form, sm90_backward_config config>
__global__ void __launch_bounds__(backward_row_threads)
    attention_backward_prepare(const __grid_constant__ sm90_backward_params params) {
  prepare_query_block<form, config>(params);
}

template <attention_form form, sm90_backward_config config>
__global__ void __launch_bounds__(sm90_backward_plan_of(form, config).threads, 1)
    attention_backward_sm90(const __grid_constant__ sm90_backward_params params) {
  extern __shared__ unsigned char shared_memory[];
  attention_backward<form, config>::run(params, shared_memory);
}

template <attention_form form, sm90_backward_config config>
__global__ void __launch_bounds__(backward_row_threads)
    attention_backward_convert(const __grid_constant__ sm90_backward_params params) {
  convert_query_block<form, config>(params);
}

template <attention_form form, sm90_backward_config config>
__global__ void __launch_bounds__(backward_row_threads)
    attention_backward_sinks(const __grid_constant__ sm90_backward_params params) {
  sink_gradient(params);
}

}  // namespace fftune
