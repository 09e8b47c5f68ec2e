// What all warps of the sm_90a backward know: barriers, which query blocks are visited, and where
// dq is.
#pragma once

#include "attention/sm90/backward_config.cuh"
#include "attention/sm90/backward_work.cuh"
#include "common/async.cuh"
#include "common/mma.cuh"

namespace fftune {

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
struct attention_backward_cta {
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

  using scores = float[score_values];
  using fragments = u32[score_steps][4];
  using gradient = float[gradient_values];
  using dq_tiles = float[plan.dq_tiles][dq_values];

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

  __device__ __forceinline__ int key_blocks() const {
    return sm90_backward_key_blocks(form, 1, attention.kv_len, bn);
  }
  __device__ __forceinline__ int matrix() const {
    return work.sequence.index * attention.kv_heads + work.kv_head;
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

  // The turns of the deterministic form: key blocks add to a query block in their order.
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

  // Accumulators that the next MMA overwrites hold nothing: to the compiler their registers would
  // else be in use, or need a value, which serialises the MMAs.
  template <int values>
  static __device__ __forceinline__ void forget(float (&c)[values]) {
#pragma unroll
    for (int i = 0; i < values; ++i) asm volatile("" : "=f"(c[i]));
  }

  // This thread's arrival: its reads and its MMAs' of the stage are complete. Every lane arrives,
  // as each has read what generic stores and bulk copies wrote there.
  static __device__ __forceinline__ void release(u32 barrier) {
    barrier_arrive(barrier);
  }
};

}  // namespace fftune
