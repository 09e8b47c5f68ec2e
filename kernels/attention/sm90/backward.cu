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
//
// The parts, each of a file:
//
//   backward_cta.cuh        what all warps know: barriers, visits, where dq is
//   backward_producers.cuh  copies, sums of dq, heads beside
//   backward_scores.cuh     S, P, dP, dS
//   backward_gradients.cuh  dq, dk, dv
//   backward_rows.cuh       the kernels before and behind: delta, dq's conversion
//   backward_work.cuh       which key block a CTA has, and which query blocks see it
//
// This file has the loop over query blocks that the MMA warpgroups run, and the kernels.
#include "attention/sm90/backward_gradients.cuh"
#include "attention/sm90/backward_producers.cuh"
#include "attention/sm90/backward_scores.cuh"

namespace fftune {

template <attention_form form, sm90_backward_config config>
struct attention_backward {
  using cta_type = attention_backward_cta<form, config>;
  static constexpr sm90_backward_plan plan = cta_type::plan;
  static constexpr int bm = config.bm, warpgroups = config.mma_warpgroups;
  static constexpr int mma_threads = cta_type::mma_threads;
  static constexpr bool splits_dim = plan.splits_dim, stages_dq = cta_type::stages_dq;
  static constexpr int gradient_values = cta_type::gradient_values;
  using work_type = typename cta_type::work_type;
  using q_ring = typename cta_type::q_ring;
  using do_ring = typename cta_type::do_ring;
  using visit = typename cta_type::visit;
  using fragments = typename cta_type::fragments;
  using gradient = typename cta_type::gradient;
  using dq_tiles = typename cta_type::dq_tiles;
  using dq_stage = typename cta_type::dq_stage;

  cta_type cta;
  attention_backward_producers<form, config> producers{cta};
  attention_backward_scores<form, config> scoring{cta};
  attention_backward_gradients<form, config> gradients{cta};

  // Waits for the next stage of q.
  __device__ __forceinline__ visit next_visit(const q_ring& q) const {
    q.wait_full();
    const visit next = cta.load_visit(cta.visit_at(q));
    if (next.block >= 0) scoring.zero_queries(q.buffer(), next);
    return next;
  }

  // Register state between S and dS.
  struct query_state {
    typename cta_type::scores s, dp;  // S, then P; and dP
    fragments p;                      // Pᵀ
  };

  // From S, which with `ahead` is complete and else under way, to P and dP, with dv begun where P
  // is in registers.
  __device__ __forceinline__ void begin_block(query_state& state, gradient& dv, const visit& now,
                                              const do_ring& d_out, u32 lse, int more,
                                              int warpgroup) const {
    d_out.wait_full();
    scoring.zero_queries(d_out.buffer(), now);
    scoring.multiply_scores(state.dp, plan.v_at, d_out.buffer(), warpgroup);
    if constexpr (!config.ahead) wgmma_wait<1>();  // S
    if (cta.is_full(now)) {
      scoring.template probabilities<false>(state.s, state.p, now, lse, warpgroup);
    } else {
      scoring.template probabilities<true>(state.s, state.p, now, lse, warpgroup);
    }
    if constexpr (splits_dim) {
      wgmma_wait<0>();  // dP
    } else {
      gradients.multiply_gradient(dv, state.p, 0, d_out.buffer(), more, warpgroup);
      wgmma_wait<1>();
    }
  }

  __device__ __forceinline__ u32 lse_at(const q_ring& q) const {
    return cta.base + plan.lse_at + q.index * bm * 4;
  }

  __device__ __forceinline__ void compute(int warpgroup) const {
    gradient dk, dv;
    cta.forget(dk);
    cta.forget(dv);
    q_ring q = cta.q_blocks();
    do_ring d_out = cta.do_blocks();
    query_state state;
    int more = 0;      // 1: dk and dv have been begun
    u32 ds_stage = 0;  // in bytes
    dq_stage dq_to = cta.dq_stage_of(warpgroup);
    if constexpr (!stages_dq) cta.wait_until_prepared();
    visit now = next_visit(q);
    if (now.block >= 0) {
      barrier_wait(cta.k_full(), 0);
      scoring.zero_keys();
      barrier_wait(cta.v_full(), 0);
    }
    if constexpr (config.ahead) {
      scoring.multiply_scores(state.s, plan.k_at, q.buffer(), warpgroup);
      wgmma_wait<0>();
    }
    while (now.block >= 0) {
      const u32 q_buffer = q.buffer(), q_empty = q.empty_barrier();
      if constexpr (!config.ahead) scoring.multiply_scores(state.s, plan.k_at, q_buffer, warpgroup);
      begin_block(state, dv, now, d_out, lse_at(q), more, warpgroup);
      fragments ds;
      const u32 delta_at = cta.base + plan.delta_at + d_out.index * bm * 4;
      if (cta.is_full(now)) {
        scoring.template score_gradients<false>(state.s, state.dp, ds, delta_at, warpgroup);
      } else {
        scoring.template score_gradients<true>(state.s, state.dp, ds, delta_at, warpgroup);
      }

      // With one stage: the MMAs of the last query block have read it.
      if constexpr (config.ds_stages == 1) cta.sync(backward_barrier::scores, mma_threads);
      const u32 p_at = cta.base + plan.p_at + ds_stage, ds_at = cta.base + plan.ds_at + ds_stage;
      if constexpr (splits_dim) scoring.store_scores(p_at, state.p, warpgroup);
      scoring.store_scores(ds_at, ds, warpgroup);
      async_proxy_fence();
      cta.sync(backward_barrier::scores, mma_threads);
      if constexpr (config.ds_stages == 2) ds_stage ^= plan.score_bytes;

      if constexpr (splits_dim) {
        gradients.multiply_gradient(dv, state.p, p_at, d_out.buffer(), more, warpgroup);
      } else {
        wgmma_wait<0>();  // dv, whose fragments' registers are needed
        cta.release(d_out.empty_barrier());
        d_out.advance();
      }
      dq_tiles dq;
      gradients.multiply_dq(dq, ds_at, warpgroup);
      gradients.multiply_gradient(dk, ds, ds_at, q_buffer, more, warpgroup);
      more = 1;
      q.advance();
      visit next = now;
      if constexpr (config.ahead) {
        // After the last block, of whatever lies there: a branch would serialise the MMAs.
        next = next_visit(q);
        scoring.multiply_scores(state.s, plan.k_at, q.buffer(), warpgroup);
      }
      if constexpr (splits_dim) {
        wgmma_wait<config.ahead ? 3 : 2>();  // dv
        cta.release(d_out.empty_barrier());
        d_out.advance();
      }
      wgmma_wait<config.ahead ? 2 : 1>();
      gradients.add_dq(dq, now, dq_to, warpgroup);
      wgmma_wait<config.ahead ? 1 : 0>();  // dk
      cta.release(q_empty);
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
      gradients.pass_dq(dq_to, {-1, 0, false});
    }
    if (cta.work.first < cta.work.last) {  // also where no block was visited
      barrier_wait(cta.k_full(), 0);
      barrier_wait(cta.v_full(), 0);
    }
    if constexpr (config.beside && !stages_dq) __threadfence();  // behind its sums of dq
    cta.sync(backward_barrier::scores, mma_threads);             // k and v are read no more
    if constexpr (config.beside && !stages_dq) {
      if (threadIdx.x == 0) count_released(cta.params.finished + cta.matrix());
    }
    gradients.store_gradients(dk, dv, warpgroup);
  }

  // --- All threads ---

  __device__ __forceinline__ void init_barriers() const {
    barrier_init(cta.k_full(), 1);
    barrier_init(cta.v_full(), 1);
    const q_ring q = cta.q_blocks();
    for (int stage = 0; stage < config.q_stages; ++stage) {
      barrier_init(q.full + stage * 8, 1);
      barrier_init(q.empty + stage * 8, mma_threads);
    }
    const do_ring d_out = cta.do_blocks();
    for (int stage = 0; stage < config.do_stages; ++stage) {
      barrier_init(d_out.full + stage * 8, 1);
      barrier_init(d_out.empty + stage * 8, mma_threads);
    }
    if constexpr (stages_dq) {
      for (int warpgroup = 0; warpgroup < warpgroups; ++warpgroup) {
        const dq_stage stage = cta.dq_stage_of(warpgroup);
        barrier_init(stage.full, 4);
        barrier_init(stage.empty, 1);
      }
    }
    barrier_init_fence();
  }

  static __device__ __forceinline__ void run(const sm90_backward_params& params,
                                             unsigned char* memory) {
    const u32 base = (shared_address(memory) + 1023) & ~1023u;  // swizzle atoms are 1024 bytes
    const attention_backward self{{params, params.attention, base,
                                   work_type(params.attention, static_cast<int>(blockIdx.x))}};
    if (self.cta.work.first_key >= self.cta.work.kv_rows) return;  // thd: a block that is nobody's
    if (threadIdx.x == 0) self.init_barriers();
    __syncthreads();
    launch_dependents();
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup == warpgroups) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(int{plan.producer_registers}));
      const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) % 128 / 32, 0);
      if (warp == 0) self.producers.load();
      if constexpr (stages_dq) {
        if (warp == 1 && threadIdx.x % 32 == 0) self.producers.add_dq_stages();
      }
      if constexpr (config.beside) {
        if (warp >= plan.busy_warps)
          attention_backward_producers<form, config>::work_beside(params);
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
