// The producer warps of the sm_90a backward: the copies of k, v and query blocks, the sums of dq by
// TMA, and heads before and after this one beside them.
#pragma once

#include "attention/sm90/backward_cta.cuh"
#include "attention/sm90/backward_rows.cuh"

namespace fftune {

template <attention_form form, sm90_backward_config config>
struct attention_backward_producers {
  using cta_type = attention_backward_cta<form, config>;
  static constexpr sm90_backward_plan plan = cta_type::plan;
  static constexpr int bm = config.bm, bn = config.bn, warpgroups = config.mma_warpgroups;
  using q_ring = typename cta_type::q_ring;
  using do_ring = typename cta_type::do_ring;
  using visit = typename cta_type::visit;

  cta_type cta;

  // --- Warps that have no other work: heads before and after this one ---

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
      cta_type::sync(backward_barrier::beside, threads);
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

  // --- Warp 0 ---

  // Rows of a sequence, which has `rows` in the tensor.
  __device__ __forceinline__ void load_rows(u32 to, const tensor_map& map, u32 barrier, int head,
                                            int row, int rows, int slab_bytes) const {
    const int sequence = form.packed_sequences() ? 0 : cta.work.sequence.index;
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
    const int row = cta.work.sequence.q_first + visit.block * bm;
    q.wait_empty();
    cta.store_visit(cta.visit_at(q), visit);
    barrier_arrive_expect(q.full_barrier(), plan.q_bytes + bm * 4);
    load_rows(q.buffer(), cta.params.q, q.full_barrier(), visit.head, row, cta.attention.q_len,
              plan.q_slab_bytes);
    bulk_load(cta.base + plan.lse_at + q.index * bm * 4, cta.params.lse_log2 + cta.stats_at(visit),
              bm * 4, q.full_barrier());
    q.advance();
    d_out.wait_empty();
    barrier_arrive_expect(d_out.full_barrier(), plan.q_bytes + bm * 4);
    load_rows(d_out.buffer(), cta.params.d_out, d_out.full_barrier(), visit.head, row,
              cta.attention.q_len, plan.q_slab_bytes);
    bulk_load(cta.base + plan.delta_at + d_out.index * bm * 4,
              cta.attention.delta + cta.stats_at(visit), bm * 4, d_out.full_barrier());
    d_out.advance();
  }

  __device__ __forceinline__ void load() const {
    const int lane = threadIdx.x % 32;
    q_ring q = cta.q_blocks();
    do_ring d_out = cta.do_blocks();
    if (lane == 0 && cta.work.first < cta.work.last) {
      const int row = cta.work.sequence.kv_first + cta.work.first_key;
      barrier_arrive_expect(cta.k_full(), plan.kv_bytes);
      const int rows = cta.attention.kv_len;
      load_rows(cta.base + plan.k_at, cta.params.k, cta.k_full(), cta.work.kv_head, row, rows,
                plan.kv_slab_bytes);
      barrier_arrive_expect(cta.v_full(), plan.kv_bytes);
      load_rows(cta.base + plan.v_at, cta.params.v, cta.v_full(), cta.work.kv_head, row, rows,
                plan.kv_slab_bytes);
    }
    cta.wait_until_prepared();
    const int heads = cta.attention.heads / cta.attention.kv_heads;
    for (int head = cta.work.kv_head * heads; head < (cta.work.kv_head + 1) * heads; ++head) {
      for (int from = cta.work.first; from < cta.work.last; from += 32) {
        const int own = from + lane;
        const int flag = own < cta.work.last ? cta.work.flag(cta.attention, head, own) : tile_empty;
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
      cta.store_visit(cta.visit_at(q), {-1, 0, false});
      barrier_arrive(q.full_barrier());
    }
  }

  // --- Warp 1: has TMA add the warpgroups' dq to memory ---

  // One thread.
  __device__ __forceinline__ void add_dq_stages() const {
    cta.wait_until_prepared();
    u32 phase = 0;
    for (bool any = true; any; phase ^= 1) {
#pragma unroll
      for (int warpgroup = 0; warpgroup < warpgroups; ++warpgroup) {
        const auto stage = cta.dq_stage_of(warpgroup);
        barrier_wait(stage.full, phase);
        const visit now = cta.load_visit(stage.buffers);
        if (now.block < 0) {
          any = false;  // the warpgroups visit the same blocks: the others end in this round, too
          continue;
        }
        if constexpr (form.deterministic) {
          cta.wait_turn(now, warpgroup);
          fence_global_async();
        }
        bulk_add(cta.dq_of(now, warpgroup), cta.base + plan.dq_at + warpgroup * plan.dq_bytes,
                 cta.dq_bytes_of(warpgroup));
        tma_store_commit();
        if constexpr (form.deterministic) {
          tma_store_wait<0>();
          fence_global_async();
          cta.end_turn(now, warpgroup);
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
      count_released(cta.params.finished + cta.matrix());
    }
  }
};

}  // namespace fftune
