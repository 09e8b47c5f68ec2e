// What all warps of the sm_90a forward know: barriers, tiles and the blocks of keys that they see,
// and which rows a thread has.
#pragma once

#include "attention/key_walk.cuh"
#include "attention/sm90/chunks.cuh"
#include "attention/sm90/config.cuh"
#include "attention/sm90/params.cuh"
#include "attention/softmax.cuh"
#include "common/async.cuh"

namespace fftune {

// Heads of v and out have v_dim features.
template <attention_form form_, int v_dim_, attention_sm90_config config_>
struct attention_sm90_traits {
  static constexpr attention_form form = form_;
  static constexpr int v_dim = v_dim_;
  static constexpr attention_sm90_config config = config_;
  static constexpr attention_sm90_plan plan = attention_sm90_plan_of(form_, v_dim_, config_);
};

// Named barriers (bar.sync, bar.arrive). 0 is __syncthreads'.
enum class attention_barrier {
  order = 1,      // + MMA warpgroup
  zero_fill = 4,  // + MMA warpgroup
};

// A tile of queries, and the chunk of keys that is to be done.
struct attention_work : attention_tile {
  int chunk;
};

template <class Traits>
struct attention_cta {
  static constexpr attention_form form = Traits::form;
  static constexpr attention_sm90_config config = Traits::config;
  static constexpr attention_sm90_plan plan = Traits::plan;
  static constexpr int bn = config.bn, warpgroups = config.mma_warpgroups;
  static constexpr bool packed = form.mask == attention_mask::packed;
  // Whether an element mask looks at the range of keys of a row: bits say it all but for these.
  static constexpr bool has_ranges = !packed || form.lengths || form.window;
  static constexpr bool orders = config.ordered && warpgroups > 1;
  static constexpr int no_tile = -(1 << 30);  // for a tile's first row
  static constexpr int most_blocks = 1 << 30;
  static constexpr bool splits = config.split_keys;
  static constexpr bool pairs = config.paired;
  static constexpr int packed_heads = config.packed_heads, part_queries = plan.part_queries;
  static constexpr int producer_warps = plan.producer_warps;
  // Blocks of keys from one of an MMA warpgroup to its next.
  static constexpr int stride = splits ? warpgroups : 1;
  // A stage is one MMA warpgroup's alone, so that this one knows its phase.
  static_assert(!splits || (warpgroups == 2 && config.stages % stride == 0 && !packed));
  static_assert(!pairs || (form.mask == attention_mask::causal && !form.window && warpgroups == 2 &&
                           !splits && !config.ordered && !config.dynamic));
  static_assert(packed_heads == 1 || (!packed && !pairs));
  static constexpr int chunk = config.chunk, chunk_blocks = chunk / bn;
  static constexpr bool divided = config.divided;
  static_assert(chunk == 0 || (chunk % bn == 0 && !packed && !pairs && !splits));
  static_assert(!divided || (chunk > 0 && !form.packed_sequences() && !config.dynamic));
  static_assert(bn % 16 == 0 && (!packed || bn == 64 || bn == 128));
  // setmaxnreg would wait for ever for registers that the CTA does not have.
  static_assert(!plan.reallocates_registers ||
                128 * (warpgroups * plan.mma_registers + plan.producer_registers) <=
                    65536 / config.ctas_per_sm / plan.threads / 8 * 8 * plan.threads);

  using T = element_type<form.type>;
  using stages = pipeline<config.stages, plan.kv_bytes>;
  using value_stages = pipeline<config.stages, plan.value_bytes>;
  using scheduler = attention_tile_scheduler<form, plan.bm, config.ctas_per_sm, packed_heads>;
  using tile_slots = pipeline<1, plan.tile_bytes>;
  using exchange_slot = pipeline<1, plan.exchange_bytes>;
  // The part of a pair with the last queries sees every key that the other part sees.
  using walk = key_walk<form, pairs ? 64 : plan.bm, part_queries, bn>;

  using score_accumulators = float[plan.score_registers];
  using out_accumulators = float[plan.out_registers];
  using probabilities = u32[bn / 16][4];
  struct mask_words {
    u32 row[2][packed ? bn / 32 : 1];
  };

  // State of an MMA thread for its two rows of a tile.
  struct tile_rows {
    softmax_row softmax[2];
    softmax_row of_chunks[2];  // all that are done
    u32 exchange_phase = 0;
  };

  const attention_sm90_params& maps;
  const attention_params& params;
  u32 base;  // of shared memory

  __device__ __forceinline__ u32 q_full(int part) const {
    return base + plan.q_barriers_at + part * 8;
  }
  __device__ __forceinline__ u32 q_empty(int part) const {
    return base + plan.q_barriers_at + (plan.q_parts + part) * 8;
  }
  template <class Stages>
  __device__ __forceinline__ Stages pipe(int buffers_at, int barriers_at) const {
    return {base + buffers_at, base + barriers_at, base + barriers_at + config.stages * 8};
  }
  __device__ __forceinline__ stages k_pipe() const {
    return pipe<stages>(plan.k_at, plan.k_barriers_at);
  }
  __device__ __forceinline__ value_stages v_pipe() const {
    return pipe<value_stages>(plan.v_at, plan.v_barriers_at);
  }

  __device__ __forceinline__ tile_slots tile_pipe() const {
    constexpr int barriers_at = plan.tile_at + plan.tile_bytes;
    return {base + plan.tile_at, base + barriers_at, base + barriers_at + 8};
  }

  // The part of a tile's queries that an MMA warpgroup has.
  static __device__ __forceinline__ int part_of(int warpgroup) {
    return plan.shares_queries ? 0 : warpgroup;
  }

  // Under a causal mask tiles end with the last row instead of beginning with the first one, so
  // that the partial tile is the shortest: its first row is negative. For a pair it is the first
  // row of the part with the last queries.
  static __device__ __forceinline__ attention_work placed(const attention_tile& of, int chunk) {
    attention_work tile{of, chunk};
    if constexpr (form.mask == attention_mask::causal) {
      const int rows = tile.sequence.q_len, tiles = ceil_div(rows, plan.bm);
      if constexpr (pairs) {
        tile.first_row = rows - 64 * (tiles - tile.first_row / plan.bm);
      } else {
        tile.first_row -= tiles * plan.bm - rows;
      }
    }
    return tile;
  }
  // First row of a part of a tile. The parts of a pair are as far from the first row as from the
  // last one, so every pair has the same total length.
  static __device__ __forceinline__ int first_row_of(const attention_tile& tile, int part) {
    if constexpr (pairs) {
      const int rows = tile.sequence.q_len, parts = ceil_div(rows, plan.bm) * 2;
      return part != 0 ? tile.first_row : 2 * rows - 64 * (parts + 1) - tile.first_row;
    } else {
      return tile.first_row + part * part_queries;
    }
  }

  // The blocks of keys of a work item, which `part` of its queries sees some of.
  __device__ __forceinline__ walk walk_of(const attention_work& tile, int part) const {
    walk keys(params, tile, first_row_of(tile, part) - tile.first_row);
    if constexpr (chunk > 0) keys.keep(tile.chunk * chunk_blocks, (tile.chunk + 1) * chunk_blocks);
    if constexpr (splits) keys.round_up(stride);
    return keys;
  }

  // The chunks of a tile, the last one first; one of a tile without keys.
  struct chunk_range {
    int last, first;
  };
  __device__ __forceinline__ chunk_range chunks_of(const attention_tile& tile) const {
    if constexpr (chunk == 0) {
      return {0, 0};
    } else {
      const walk keys(params, tile, 0);
      const int first = keys.lowest() / chunk_blocks;
      return {larger(keys.block() / chunk_blocks, first), first};
    }
  }

  // From MMA warpgroup `warpgroup` to the other one.
  __device__ __forceinline__ exchange_slot exchange_from(int warpgroup) const {
    const u32 barriers = base + plan.exchange_at + 2 * plan.exchange_bytes + warpgroup * 16;
    return {base + plan.exchange_at + warpgroup * plan.exchange_bytes, barriers, barriers + 8};
  }

  // One thread: tells the MMA warpgroups their next tile, or that there is none.
  __device__ __forceinline__ void publish(const tile_slots& to, bool is_valid,
                                          const attention_work& tile) const {
    to.wait_empty();
    store_shared(
        to.buffer(),
        make_float4(__int_as_float(is_valid ? tile.first_row : no_tile), __int_as_float(tile.head),
                    __int_as_float(tile.sequence.index), __int_as_float(tile.chunk)));
    if constexpr (plan.tile_bytes > 16) {
      store_shared(to.buffer() + 16, make_float4(__int_as_float(tile.sequence.q_first),
                                                 __int_as_float(tile.sequence.q_len),
                                                 __int_as_float(tile.sequence.kv_first),
                                                 __int_as_float(tile.sequence.kv_len)));
    }
    barrier_arrive(to.full_barrier());
  }

  // Waits for the tile that publish() tells.
  __device__ __forceinline__ attention_work published(const tile_slots& from) const {
    from.wait_full();
    attention_work tile;
    const float4 place = load_shared(from.buffer());
    tile.first_row = __float_as_int(place.x);
    tile.head = __float_as_int(place.y);
    tile.sequence = {__float_as_int(place.z), 0, params.q_len, 0, params.kv_len};
    tile.chunk = __float_as_int(place.w);
    if constexpr (plan.tile_bytes > 16) {
      const float4 extent = load_shared(from.buffer() + 16);
      tile.sequence.q_first = __float_as_int(extent.x);
      tile.sequence.q_len = __float_as_int(extent.y);
      tile.sequence.kv_first = __float_as_int(extent.z);
      tile.sequence.kv_len = __float_as_int(extent.w);
    }
    return tile;
  }

  static __device__ __forceinline__ int warpgroup_of_thread() {
    return __shfl_sync(~0u, threadIdx.x / 128, 0);
  }
  // The first of a thread's two rows among the 64 of its warpgroup; the other is 8 below.
  static __device__ __forceinline__ int own_row() {
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  }
  // The part of a tile's queries that this thread's rows are of, and the first of them.
  static __device__ __forceinline__ int own_part() { return part_of(warpgroup_of_thread()); }
  // The first query of this thread's part. All lanes of a warp.
  static __device__ __forceinline__ int own_first_query(const attention_tile& tile) {
    return first_row_of(tile, own_part());
  }
  // The query of one of this thread's two rows, and its head.
  static __device__ __forceinline__ int query_of(int first_query, int i) {
    return first_query + (own_row() + i * 8) / packed_heads;
  }
  static __device__ __forceinline__ int head_of(const attention_tile& tile, int i) {
    return tile.head * packed_heads + (own_row() + i * 8) % packed_heads;
  }
  // The first of a thread's columns among 8.
  static __device__ __forceinline__ int own_column() { return threadIdx.x % 4 * 2; }

  static __device__ __forceinline__ void release(u32 empty_barrier) {
    if (threadIdx.x % 128 == 0) barrier_arrive(empty_barrier);
  }

  __device__ __forceinline__ void wait_turn() const {
    if constexpr (orders) {
      named_barrier_sync(static_cast<int>(attention_barrier::order) + warpgroup_of_thread(), 256);
    }
  }
  __device__ __forceinline__ void pass_turn(int warpgroup) const {
    if constexpr (orders) {
      const int next = warpgroup + 1 == warpgroups ? 0 : warpgroup + 1;
      named_barrier_arrive(static_cast<int>(attention_barrier::order) + next, 256);
    }
  }
};

}  // namespace fftune
