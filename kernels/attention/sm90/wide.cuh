// Attention's forward at heads of 258 to 512 features: forward.cu's MMA warpgroups with other
// roles.
//
//   producer warps           shared memory                 MMA warpgroups (2)
//  +----------------------+  +--------------------------+  +------------------------------------+
//  | TMA: q of the tile,  |  | q: 64 rows               |  | scores = q k^T, of both the same   |
//  | then parts of blocks |->| a ring of stages: 64     |->| softmax in registers               |
//  | of k and v           |  |   keys or values of 128  |  | out += scores v, of each half of   |
//  |                      |  |   columns                |  |   the columns                      |
//  +----------------------+  +--------------------------+  +------------------------------------+
//
// The output of 64 queries is too wide for the registers of one MMA warpgroup. Two compute the same
// scores, so that probabilities never leave their registers, and half of the output's columns each.
// A block of 64 keys and its values is too large to be a stage: parts of it are. They come in the
// order of use, as in forward.cu: the keys of a block, then the values of the one before. A CTA
// has one tile, or one chunk of a tile's keys, whose sums attention_chunk_sums_sm90 adds up.
//
//  barrier         arrivals that complete a phase   who waits
//  q full          the producer with q's bytes      MMA warpgroups
//  full [stage]    the producer with the bytes      MMA warpgroups
//  empty [stage]   a thread of each MMA warpgroup   the producers
//
// An MMA warpgroup passes over stages of values that only the other one uses: it releases them when
// they are full, so that the phases of both stay in step.
#pragma once

#include "attention/sm90/forward_loads.cuh"
#include "attention/sm90/forward_output.cuh"
#include "attention/sm90/forward_scores.cuh"

namespace fftune {

template <attention_form form_, attention_sm90_config config_>
struct attention_wide_traits {
  static constexpr attention_form form = form_;
  static constexpr int v_dim = form_.dim;
  static constexpr attention_sm90_config config = config_;
  static constexpr attention_sm90_plan plan = attention_wide_plan_of(form_, config_);
};

template <class Traits>
struct attention_wide_forward {
  using cta_type = attention_cta<Traits>;
  static constexpr attention_form form = Traits::form;
  static constexpr attention_sm90_config config = Traits::config;
  static constexpr attention_sm90_plan plan = Traits::plan;
  static constexpr int bn = config.bn;
  static constexpr bool divided = config.divided;
  using T = typename cta_type::T;
  using stages = typename cta_type::stages;
  using scheduler = typename cta_type::scheduler;
  using walk = typename cta_type::walk;
  using score_accumulators = typename cta_type::score_accumulators;
  using probabilities = typename cta_type::probabilities;
  using tile_rows = typename cta_type::tile_rows;
  using row_values = typename attention_output<Traits>::row_values;
  static_assert(config.mma_warpgroups == 2 && bn == 64 && divided == (config.chunk > 0));
  static constexpr int part_columns = attention_wide_columns;
  static constexpr int parts = plan.slabs / plan.stage_slabs;  // of a block
  // Those of values that an MMA warpgroup has; of an odd number the last one is both's.
  static constexpr int own_parts = plan.out_columns / part_columns;
  using out_accumulators = float[own_parts][part_columns / 2];

  cta_type cta;
  attention_loads<Traits> loads{cta};
  attention_scores<Traits> scoring{cta};
  attention_output<Traits> output{cta};

  // Whether there is a tile for this CTA. Divided, the first chunks of all tiles come first.
  static __device__ __forceinline__ bool find_tile(const attention_params& params,
                                                   attention_work& tile) {
    scheduler work(params);
    int chunk = 0;
    if constexpr (divided) {
      const int all = work.count(), item = static_cast<int>(blockIdx.x);
      chunk = item / all;
      work.take(item - chunk * all);
    }
    tile = cta_type::placed(work.tile(), chunk);
    return work.is_valid();
  }

  // --- Producer warps ---

  __device__ __forceinline__ void load(int warp) const {
    attention_work tile;
    if (!find_tile(cta.params, tile)) return;
    walk keys = cta.walk_of(tile, 0);
    if (!keys.is_valid()) return;
    const int column = loads.kv_column(tile);
    stages ring = cta.k_pipe();
    int page = loads.page_of_lane(tile, keys.block());
    const auto next = [&] {
      const typename attention_loads<Traits>::placed_block block{keys.block(), page};
      keys.next(cta.params, tile, 0);
      if (keys.is_valid()) page = loads.page_of_lane(tile, keys.block());
      return block;
    };
    const auto load_parts = [&](const tensor_map& map,
                                const typename attention_loads<Traits>::placed_block& block) {
      for (int part = 0; part < parts; ++part) {
        loads.load_block(warp, ring, map, tile, column, block, part * plan.stage_slabs);
        ring.advance();
      }
    };
    if (warp == 0 && is_elected()) loads.load_q(tile, 0);
    typename attention_loads<Traits>::placed_block before = next();
    load_parts(cta.maps.k, before);
    while (keys.is_valid()) {
      const typename attention_loads<Traits>::placed_block block = next();
      load_parts(cta.maps.k, block);
      load_parts(cta.maps.v, before);
      before = block;
    }
    load_parts(cta.maps.v, before);
  }

  // --- MMA warpgroups ---

  // The ring `by` stages further, or back: no more than it has.
  static __device__ __forceinline__ stages moved(stages ring, int by) {
    int index = static_cast<int>(ring.index) + by;
    if (index >= config.stages || index < 0) {
      index += index < 0 ? config.stages : -config.stages;
      ring.phase ^= 1;
    }
    ring.index = static_cast<u32>(index);
    return ring;
  }

  // Each part is a group of MMAs of its own.
  __device__ __forceinline__ void issue_scores(score_accumulators& scores, stages& ring) const {
    const u64 q_rows = wgmma_swizzled_descriptor<plan.row_bytes>(cta.base);
    constexpr int steps = part_columns / 16, in_slab = plan.slab_columns / 16;
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      ring.wait_full();
      wgmma_fence();
      const u64 k_rows = wgmma_swizzled_descriptor<plan.row_bytes>(ring.buffer());
#pragma unroll
      for (int step = 0; step < smaller(steps, plan.score_steps - part * steps); ++step) {
        const int slab = step / in_slab, at = step % in_slab * 32;
        const int q_slab = part * plan.stage_slabs + slab;
        wgmma<T, bn>(scores, wgmma_advance(q_rows, q_slab * 64 * plan.row_bytes + at),
                     wgmma_advance(k_rows, slab * bn * plan.row_bytes + at),
                     part + step > 0 ? 1 : 0);
      }
      wgmma_commit();
      ring.advance();
    }
  }

  // Behind the scores' groups of MMAs are `behind` others.
  template <int behind>
  __device__ __forceinline__ void release_keys(stages from) const {
    release_part<behind, 0>(from);
  }
  template <int behind, int part>
  __device__ __forceinline__ void release_part(stages& from) const {
    if constexpr (part < parts) {
      wgmma_wait<behind + parts - 1 - part>();
      cta.release(from.empty_barrier());
      from.advance();
      release_part<behind, part + 1>(from);
    }
  }

  // The stage of one of this warpgroup's parts of values. Without a part of its own it takes the
  // last one, for columns that the output does not have.
  static __device__ __forceinline__ stages values_of(const stages& ring, int warpgroup, int i) {
    return moved(ring, smaller(warpgroup * own_parts + i, parts - 1));
  }

  __device__ __forceinline__ void zero_foreign(const attention_tile& tile, u32 values,
                                               int block) const {
    if constexpr (form.foreign_keys() || plan.head_boxes) {
      const int count = tile.sequence.kv_len - block * bn;
      if (count >= bn) return;
      constexpr int vectors_row = plan.row_bytes / 16;
      const int vectors = (bn - count) * vectors_row;  // of a slab
      for (int i = threadIdx.x % 128; i < plan.stage_slabs * vectors; i += 128) {
        const int slab = i / vectors;
        store_shared(values + (slab * bn + count) * plan.row_bytes + (i - slab * vectors) * 16,
                     make_float4(0, 0, 0, 0));
      }
      async_proxy_fence();
      named_barrier_sync(static_cast<int>(attention_barrier::zero_fill) + cta.warpgroup_of_thread(),
                         128);
    }
  }

  __device__ __forceinline__ void issue_values(out_accumulators& out, const probabilities& from,
                                               const attention_tile& tile, int block,
                                               const stages& ring, int warpgroup,
                                               int accumulate) const {
#pragma unroll
    for (int i = 0; i < own_parts; ++i) {
      const stages own = values_of(ring, warpgroup, i);
      own.wait_full();
      zero_foreign(tile, own.buffer(), block);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < own_parts; ++i) {
      const u64 v_rows = wgmma_swizzled_descriptor<plan.row_bytes, bn * plan.row_bytes>(
          values_of(ring, warpgroup, i).buffer());
#pragma unroll
      for (int step = 0; step < bn / 16; ++step) {
        wgmma_of_width<T, part_columns, true>(out[i], from[step],
                                              wgmma_advance(v_rows, step * 16 * plan.row_bytes),
                                              step > 0 ? 1 : accumulate);
      }
    }
    wgmma_commit();
  }

  // All parts of a block's values, once the MMAs are complete.
  __device__ __forceinline__ void release_values(stages from) const {
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      from.wait_full();
      cta.release(from.empty_barrier());
      from.advance();
    }
  }

  // As forward.cu's: of this warpgroup's columns.
  __device__ __forceinline__ void leave(const row_values& sums, const softmax_row& row,
                                        const attention_work& tile, int first_query, int i,
                                        int warpgroup) const {
    if (output.out_row(tile, first_query, i) == nullptr) return;
    constexpr int length = attention_chunk_row(form), columns = length - 8;
    const i64 queries = static_cast<i64>(cta.params.batch) * cta.params.q_len;
    const i64 query =
        static_cast<i64>(tile.sequence.index) * cta.params.q_len + cta.query_of(first_query, i);
    float* const to =
        reinterpret_cast<float*>(cta.params.partials) +
        ((tile.chunk * queries + query) * cta.params.heads + cta.head_of(tile, i)) * length;
    const int first = warpgroup * plan.out_columns + cta.own_column();
#pragma unroll
    for (int at = 0; at < plan.out_columns / 4; at += 2) {
      const int column = first + at / 2 * 8;
      if (column < columns) {
        *reinterpret_cast<float2*>(to + column) = float2{sums[at], sums[at + 1]};
      }
    }
    if (warpgroup != 0) return;
    const int quarter = threadIdx.x % 4;
    to[columns + quarter] = row.sum;
    to[columns + 4 + quarter] = row.reference;
  }

  __device__ __forceinline__ void store(const out_accumulators& out, const tile_rows& rows,
                                        const attention_work& tile, int warpgroup) const {
    const int first_query = cta.own_first_query(tile);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_values sums;
#pragma unroll
      for (int at = 0; at < plan.out_columns / 4; ++at) {
        constexpr int of_part = part_columns / 4;
        sums[at] = out[at / of_part][at % of_part / 2 * 4 + i * 2 + at % 2];
      }
      if constexpr (divided) {
        leave(sums, rows.softmax[i], tile, first_query, i, warpgroup);
        continue;
      }
      output.store_row(sums, rows.softmax[i], tile, first_query, i, warpgroup * plan.out_columns);
    }
  }

  __device__ __forceinline__ void compute() const {
    const int warpgroup = cta.warpgroup_of_thread();
    attention_work tile;
    if (!find_tile(cta.params, tile)) return;
    walk keys = cta.walk_of(tile, 0);
    alignas(16) out_accumulators out = {};
    tile_rows rows;
    if (!keys.is_valid()) {
      if constexpr (!divided) store(out, rows, tile, warpgroup);
      return;
    }
    const score_scaling<form> scaling(cta.params);
    alignas(16) score_accumulators scores;
    probabilities from;
    typename cta_type::mask_words words;
    stages ring = cta.k_pipe();
    int before = keys.block(), accumulate = 0;
    if (warpgroup == 1) cta.pass_turn(warpgroup);  // the first one begins
    barrier_wait(cta.q_full(0), 0);
    {
      issue_scores(scores, ring);
      scoring.load_mask(tile, before, words);
      release_keys<0>(moved(ring, -parts));
      scoring.transform(scores, tile, before, scaling);
      if (keys.masked()) scoring.apply_mask(scores, tile, before, words);
      float unused[2];
      scoring.template exponentiate<true>(scores, rows, scaling.factor(), unused);
      scoring.convert(scores, from);
      keys.next(cta.params, tile, 0);
    }
    // A block of keys, and the values of the one before.
    const auto block_step = [&]<bool masked>() {
      const int block = keys.block();
      keys.next(cta.params, tile, 0);
      if constexpr (masked) scoring.load_mask(tile, block, words);
      cta.wait_turn();
      issue_scores(scores, ring);
      issue_values(out, from, tile, before, ring, warpgroup, accumulate);
      cta.pass_turn(warpgroup);
      release_keys<1>(moved(ring, -parts));
      scoring.transform(scores, tile, block, scaling);
      if constexpr (masked) scoring.apply_mask(scores, tile, block, words);
      float rescale[2];
      const bool rescales =
          scoring.template exponentiate<false>(scores, rows, scaling.factor(), rescale);
      scoring.complete_before_wait(rows.softmax[0].sum + rows.softmax[1].sum);
      wgmma_wait<0>();
      release_values(ring);
      ring = moved(ring, parts);
      if (rescales) {
#pragma unroll
        for (int part = 0; part < own_parts; ++part) {
#pragma unroll
          for (int i = 0; i < part_columns / 2; ++i) out[part][i] *= rescale[i / 2 % 2];
        }
      }
      scoring.convert(scores, from);
      before = block;
      accumulate = 1;
    };
    while (keys.is_valid()) {
      if (keys.masked()) {
        block_step.template operator()<true>();
      } else {
        block_step.template operator()<false>();
      }
    }
    cta.wait_turn();
    issue_values(out, from, tile, before, ring, warpgroup, accumulate);
    cta.pass_turn(warpgroup);
    wgmma_wait<0>();
    store(out, rows, tile, warpgroup);
  }

  // --- All threads ---

  static __device__ __forceinline__ void run(const attention_sm90_params& params,
                                             unsigned char* memory) {
    const u32 base = (shared_address(memory) + 1023) & ~1023u;  // swizzle atoms are 1024 bytes
    const attention_wide_forward self{{params, params.attention, base}};
    if (threadIdx.x == 0) {
      barrier_init(self.cta.q_full(0), 1);
      barrier_init(self.cta.q_empty(0), 1);
      const stages ring = self.cta.k_pipe();
      for (int stage = 0; stage < config.stages; ++stage) {
        barrier_init(ring.full + stage * 8, 1);
        barrier_init(ring.empty + stage * 8, 2);
      }
      barrier_init_fence();
    }
    const int producer = static_cast<int>(threadIdx.x) - 256;
    if (producer == 0) {
      tma_prefetch(params.q);
      tma_prefetch(params.k);
      tma_prefetch(params.v);
    }
    __syncthreads();
    launch_dependents();
    wait_for_dependencies();
    if (producer >= 0) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(int{plan.producer_registers}));
      const int warp = __shfl_sync(~0u, producer / 32, 0);
      if (warp < plan.producer_warps) self.load(warp);
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(int{plan.mma_registers}));
      self.compute();
    }
  }
};

template <attention_form form, attention_sm90_config config>
__global__ void __launch_bounds__(attention_wide_plan_of(form, config).threads, 1)
    attention_wide_sm90(const __grid_constant__ attention_sm90_params params) {
  extern __shared__ unsigned char shared_memory[];
  attention_wide_forward<attention_wide_traits<form, config>>::run(params, shared_memory);
}

}  // namespace fftune
