// The sm_90a attention forward: out = softmax(q k^T) v without the scores ever being in memory. TMA
// and wgmma, warp-specialised, persistent.
//
//   producer warp            shared memory                  MMA warpgroups (1 to 3)
//  +-------------------+   +---------------------------+   +---------------------------------+
//  | TMA: q of a tile, |   | q: 64 rows of each        |   | scores = q k^T        wgmma     |
//  | then its blocks   |-->|    MMA warpgroup          |-->| softmax               registers |
//  | of k and v        |   | k: stages of bn keys      |   | out += scores v       wgmma, A  |
//  |                   |   | v: stages of bn keys      |   |                in registers     |
//  +-------------------+   | barriers                  |   | out, lse: 16-byte stores        |
//                          +---------------------------+   +---------------------------------+
//
//  barrier               arrivals that complete a phase     who waits
//  q full [part]         the producer with q's bytes        its MMA warpgroup, or both
//  q empty [part]        a thread of each of these          the producer
//  k, v full [stage]     the producer with the bytes        MMA warpgroups
//  k, v empty [stage]    a thread of each MMA warpgroup     the producer
//  order [warpgroup]     named: itself and the one before   the MMA warpgroup
//  tile full             a thread of the producer           MMA warpgroups: which tile is next
//  tile empty            MMA threads, other producer warps  the producer
//  zero fill [warpgroup] named: its 128 threads             the same
//  exchange full, empty  each thread of an MMA warpgroup    the other one
//
// Two overlaps keep the tensor cores busy during the softmax. An MMA warpgroup issues the scores of
// the next block, then the product of this block's probabilities with v, and computes the softmax
// of the first while the second runs. And the MMA warpgroups issue in turn (order), so that one's
// softmax runs beside the others' MMAs. At the end of a tile its last product with v is issued
// together with the next tile's first scores, beneath which the tile is stored. Under a causal mask
// a warpgroup passes over the blocks at a tile's beginning that only later rows see.
//
// Where each SM has but one tile, the longest counts, of causal ones twice the average. A tile can
// be a pair, of whose MMA warpgroups one has 64 queries as far from the first as the other's are
// from the last: all tiles are of one length.
//
// With split_keys two MMA warpgroups have the same queries, and each every other block of keys; a
// last block that nobody sees makes them even. At the end of a tile each gives the other one of a
// thread's two rows, and finishes the other one.
//
// With packed heads a tile has the heads of q that share keys: the rows of a part are 64 /
// packed_heads queries, each with its heads. Pages are copies of their own, and four producer warps
// share them: the first one also schedules, the others read its tiles as the MMA warpgroups do.
//
// With chunks (chunks.cuh) the part of a tile's keys in a chunk is a work item: an MMA warpgroup
// adds what it has of one to its sums in shared memory, and stores the tile after the last one.
// Divided, each is left in the workspace, and a second kernel adds up the chunks of a row.
//
// The accumulators of scores have the layout of A in registers, so probabilities never leave them.
//
// The parts, each of a file:
//
//   forward_cta.cuh     what all warps know: barriers, tiles, the rows of a thread
//   forward_loads.cuh   the producer: tiles, and the copies of q, k and v
//   forward_scores.cuh  scores: product, cap and bias, mask, softmax
//   forward_output.cuh  product with v; sums over chunks and MMA warpgroups; stores
//   wide.cuh            heads of 258 to 512 features, by the same parts
//   chunk_sums.cuh      the second kernel of a divided forward
//
// This file has the loop over tiles and blocks that the MMA warpgroups run, and the kernel.
// compute() is long because its steps share pipelines, accumulators and the state of a tile, all in
// registers: as functions each would take a dozen of these.
#include "attention/sm90/chunk_sums.cuh"
#include "attention/sm90/forward_loads.cuh"
#include "attention/sm90/forward_output.cuh"
#include "attention/sm90/forward_scores.cuh"
#include "attention/sm90/wide.cuh"

namespace fftune {

template <class Traits>
struct attention_forward {
  using cta_type = attention_cta<Traits>;
  static constexpr attention_form form = Traits::form;
  static constexpr attention_sm90_config config = Traits::config;
  static constexpr attention_sm90_plan plan = Traits::plan;
  static constexpr int warpgroups = config.mma_warpgroups;
  static constexpr bool splits = config.split_keys;
  static constexpr int stride = cta_type::stride, most_blocks = 1 << 30;
  using stages = typename cta_type::stages;
  using value_stages = typename cta_type::value_stages;
  using tile_slots = typename cta_type::tile_slots;
  using exchange_slot = typename cta_type::exchange_slot;
  using walk = typename cta_type::walk;

  cta_type cta;
  attention_loads<Traits> loads{cta};
  attention_scores<Traits> scoring{cta};
  attention_output<Traits> output{cta};

  // The next tile that has key blocks; those that have none are stored. All threads of an MMA
  // warpgroup.
  __device__ __forceinline__ bool next_tile(tile_slots& tiles, attention_work& tile,
                                            walk& keys) const {
    for (;;) {
      tile = cta.published(tiles);
      barrier_arrive(tiles.empty_barrier());
      tiles.advance();
      if (tile.first_row == cta_type::no_tile) return false;
      keys = cta.walk_of(tile, cta.own_part());
      if constexpr (splits) keys.skip(cta.warpgroup_of_thread());
      if (keys.is_valid()) return true;
      output.store_empty(tile);
    }
  }

  // The work of an MMA warpgroup.
  __device__ __forceinline__ void compute() const {
    const int warpgroup = cta.warpgroup_of_thread(), part = cta.part_of(warpgroup);
    const score_scaling<form> scaling(cta.params);
    stages k = cta.k_pipe();
    if constexpr (splits) k.advance(warpgroup);
    u32 q_phase = 0;
    tile_slots tiles = cta.tile_pipe();
    attention_work tile = {};
    walk keys(cta.params, tile, 0);
    if (!next_tile(tiles, tile, keys)) return;
    if (warpgroup == warpgroups - 1) cta.pass_turn(warpgroup);  // the first one begins

    alignas(16) typename cta_type::score_accumulators scores;
    alignas(16) typename cta_type::out_accumulators out;
    typename cta_type::probabilities from;
    typename cta_type::tile_rows rows;
    typename cta_type::mask_words words;
    const auto next_block = [&] {
      if constexpr (splits) {
        keys.skip(stride);
      } else {
        keys.next(cta.params, tile, cta.first_row_of(tile, part) - tile.first_row);
      }
    };
    const auto release_k = [&](bool was_last) {
      cta.release(k.empty_barrier());
      if constexpr (splits) {
        k.advance(stride);
      } else {
        k.advance();
      }
      if (was_last) cta.release(cta.q_empty(part));
    };
    // The values of a block are in use until one of this warpgroup's blocks, or two, later than its
    // keys.
    const auto values = [&](int blocks_behind) {
      value_stages v{k.buffers, k.full, k.empty, k.index, k.phase};
      v.buffers += plan.v_at - plan.k_at;
      v.full += plan.v_barriers_at - plan.k_barriers_at;
      v.empty += plan.v_barriers_at - plan.k_barriers_at;
      v.retreat(blocks_behind * stride);
      return v;
    };
    // The product with the values of block `before`, whose probabilities are there.
    int before = 0, accumulate = 0;
    const auto multiply_values = [&](const attention_work& of, int blocks_behind) {
      const value_stages v = values(blocks_behind);
      v.wait_full();
      output.zero_foreign(of, v.buffer(), before);
      output.issue_values(out, from, v.buffer(), accumulate);
    };
    // Passes over the first blocks of a tile if this warpgroup sees nothing of them: as many as
    // stages allow while the values of the tile before are in use, `most`. Their stages are
    // released when they are full, so that phases stay in step.
    const auto pass_over = [&](int most) {
      int count = 0;
      if constexpr (plan.q_parts > 1) {
        for (const int unseen = smaller(keys.unseen(), most); count < unseen; ++count) {
          k.wait_full();
          values(0).wait_full();
          cta.release(k.empty_barrier());
          cta.release(values(0).empty_barrier());
          k.advance();
          next_block();
        }
      }
      return count;
    };
    // One block of keys, and the values of the one before.
    const auto block_step = [&]<bool masked>() {
      const int block = keys.block();
      next_block();
      if constexpr (masked) scoring.load_mask(tile, block, words);
      k.wait_full();
      cta.wait_turn();
      scoring.issue_scores(scores, k.buffer());
      multiply_values(tile, 1);
      cta.pass_turn(warpgroup);
      wgmma_wait<1>();
      release_k(!keys.is_valid());
      scoring.transform(scores, tile, block, scaling);
      if constexpr (masked) scoring.apply_mask(scores, tile, block, words);
      float rescale[2];
      const bool rescales =
          scoring.template exponentiate<false>(scores, rows, scaling.factor(), rescale);
      scoring.complete_before_wait(rows.softmax[0].sum + rows.softmax[1].sum);
      wgmma_wait<0>();
      cta.release(values(2).empty_barrier());
      if (rescales) {
#pragma unroll
        for (int i = 0; i < plan.out_registers; ++i) out[i] *= rescale[i / 2 % 2];
      }
      scoring.convert(scores, from);
      before = block;
      accumulate = 1;
    };

    int passed_over = pass_over(most_blocks);
    barrier_wait(cta.q_full(part), q_phase);
    k.wait_full();
    scoring.issue_scores(scores, k.buffer());
    scoring.load_mask(tile, keys.block(), words);
    wgmma_wait<0>();
    for (;;) {
      // The first block's scores are there.
      {
        before = keys.block();
        accumulate = 0;
        const bool masked = keys.masked();
        next_block();
        release_k(!keys.is_valid());
        q_phase ^= 1;
        scoring.transform(scores, tile, before, scaling);
        if (masked) scoring.apply_mask(scores, tile, before, words);
        float unused[2];
        scoring.template exponentiate<true>(scores, rows, scaling.factor(), unused);
        scoring.convert(scores, from);
      }
      // The turns of the blocks passed over, as every warpgroup has the same number.
      for (; passed_over > 0; --passed_over) {
        cta.wait_turn();
        cta.pass_turn(warpgroup);
      }
      while (keys.is_valid()) {
        if (keys.masked()) {
          block_step.template operator()<true>();
        } else {
          block_step.template operator()<false>();
        }
      }
      const attention_work done = tile;
      if (!next_tile(tiles, tile, keys)) {
        cta.wait_turn();
        multiply_values(done, 1);
        cta.pass_turn(warpgroup);
        wgmma_wait<0>();
        cta.release(values(1).empty_barrier());
        output.store(out, done, rows);
        return;
      }
      passed_over = pass_over(config.stages - 1);
      cta.wait_turn();
      multiply_values(done, 1 + passed_over);
      cta.pass_turn(warpgroup);
      barrier_wait(cta.q_full(part), q_phase);
      k.wait_full();
      scoring.issue_scores(scores, k.buffer());
      scoring.load_mask(tile, keys.block(), words);
      wgmma_wait<1>();
      cta.release(values(1 + passed_over).empty_barrier());
      output.store(out, done, rows);
      wgmma_wait<0>();
    }
  }

  // --- All threads ---

  // One thread.
  __device__ __forceinline__ void init_barriers() const {
#pragma unroll
    for (int part = 0; part < plan.q_parts; ++part) {
      barrier_init(cta.q_full(part), 1);
      barrier_init(cta.q_empty(part), stride);
    }
    const stages k = cta.k_pipe();
    const value_stages v = cta.v_pipe();
#pragma unroll
    for (int stage = 0; stage < config.stages; ++stage) {
      barrier_init(k.full + stage * 8, 1);
      barrier_init(v.full + stage * 8, 1);
      barrier_init(k.empty + stage * 8, plan.q_parts);
      barrier_init(v.empty + stage * 8, plan.q_parts);
    }
    if constexpr (splits) {
#pragma unroll
      for (int warpgroup = 0; warpgroup < warpgroups; ++warpgroup) {
        const exchange_slot slot = cta.exchange_from(warpgroup);
        barrier_init(slot.full, 128);
        barrier_init(slot.empty, 128);
      }
    }
    const tile_slots tiles = cta.tile_pipe();
    barrier_init(tiles.full, 1);
    barrier_init(tiles.empty, 128 * warpgroups + plan.producer_warps - 1);
    barrier_init_fence();
  }

  static __device__ __forceinline__ void run(const attention_sm90_params& params,
                                             unsigned char* memory) {
    const u32 base = (shared_address(memory) + 1023) & ~1023u;  // swizzle atoms are 1024 bytes
    const attention_forward self{{params, params.attention, base}};
    const int producer = static_cast<int>(threadIdx.x) - warpgroups * 128;
    if (threadIdx.x == 0) self.init_barriers();
    if (producer == 0) {
      tma_prefetch(params.q);
      tma_prefetch(params.k);
      tma_prefetch(params.v);
    }
    __syncthreads();
    launch_dependents();
    if (producer >= 0) {
      if constexpr (plan.reallocates_registers)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(int{plan.producer_registers}));
      const int warp = __shfl_sync(~0u, producer / 32, 0);
      if (warp == 0) self.loads.produce();
      if (plan.producer_warps > 1 && warp > 0 && warp < plan.producer_warps) {
        wait_for_dependencies();
        self.loads.assist(warp);
      }
    } else {
      if constexpr (plan.reallocates_registers)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(int{plan.mma_registers}));
      wait_for_dependencies();
      self.compute();
    }
  }
};

template <attention_form form, attention_sm90_config config>
__global__ void __launch_bounds__(attention_sm90_plan_of(form, form.dim, config).threads,
                                  config.ctas_per_sm)
    attention_forward_sm90(const __grid_constant__ attention_sm90_params params) {
  extern __shared__ unsigned char shared_memory[];
  attention_forward<attention_sm90_traits<form, form.dim, config>>::run(params, shared_memory);
}

// Values of another number of features than keys.
template <attention_form form, int v_dim, attention_sm90_config config>
__global__ void __launch_bounds__(attention_sm90_plan_of(form, v_dim, config).threads,
                                  config.ctas_per_sm)
    attention_forward_sm90_values(const __grid_constant__ attention_sm90_params params) {
  extern __shared__ unsigned char shared_memory[];
  attention_forward<attention_sm90_traits<form, v_dim, config>>::run(params, shared_memory);
}

}  // namespace fftune
