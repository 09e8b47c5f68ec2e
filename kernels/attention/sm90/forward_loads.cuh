// The producer warps of the sm_90a forward: which queries, keys and values, in which order.
#pragma once

#include "attention/sm90/forward_cta.cuh"

namespace fftune {

template <class Traits>
struct attention_loads {
  using cta_type = attention_cta<Traits>;
  static constexpr attention_form form = Traits::form;
  static constexpr int v_dim = Traits::v_dim;
  static constexpr bool other_values = v_dim != form.dim;
  static constexpr attention_sm90_config config = Traits::config;
  static constexpr attention_sm90_plan plan = Traits::plan;
  static constexpr int bn = config.bn, chunk = config.chunk, packed_heads = config.packed_heads;
  static constexpr int producer_warps = plan.producer_warps;
  static constexpr bool divided = config.divided;
  using stages = typename cta_type::stages;
  using value_stages = typename cta_type::value_stages;
  using scheduler = typename cta_type::scheduler;
  using tile_slots = typename cta_type::tile_slots;
  using walk = typename cta_type::walk;

  cta_type cta;

  __device__ __forceinline__ int kv_head_of(const attention_tile& tile) const {
    return packed_heads > 1 ? tile.head : tile.head / (cta.params.heads / cta.params.kv_heads);
  }
  // Where the keys and values of a tile's head begin in their rows: a column, or of boxes of heads
  // the number of that box.
  __device__ __forceinline__ int kv_column(const attention_tile& tile) const {
    return kv_head_of(tile) *
           (plan.head_boxes ? cta.params.kv_head / form.dim : cta.params.kv_head);
  }
  // Where its values begin, whose keys begin at `column`.
  __device__ __forceinline__ int value_column(const attention_tile& tile, int column) const {
    return other_values ? kv_head_of(tile) * v_dim : column;
  }

  // A block of keys, and where the part of it is that a lane looked up: its page.
  struct placed_block {
    int number, page;
  };
  // The page of this lane's part of a block. The lanes of a warp look up side by side, and a block
  // ahead: one thread would wait for a page's number in front of each copy. Beyond the last key it
  // is any page: these keys are masked.
  __device__ __forceinline__ int page_of_lane(const attention_tile& tile, int block) const {
    if constexpr (!form.paged) return 0;
    static_assert(bn / 16 <= 32);  // a page has 16 tokens or more
    const int shift = __ffs(cta.params.page) - 1;
    const int last = larger(tile.sequence.kv_len - 1, 0) >> shift;
    const int row = block * bn + static_cast<int>(threadIdx.x % 32) * smaller(cta.params.page, bn);
    const int page = page_table(cta.params, tile.sequence.index)[smaller(row >> shift, last)];
    // Tokens of all pages are one after the other: those of a page that there is not are before.
    if constexpr (plan.head_boxes) return has_page(cta.params, page) ? page : -1;
    return page;
  }

  // One warp of the producer: its share of the keys or values of a block. The first warp expects
  // the bytes of all: no phase completes before it has.
  template <bool of_values = false, class Stages>
  __device__ __forceinline__ void load_block(int warp, const Stages& to, const tensor_map& map,
                                             const attention_tile& tile, int column,
                                             const placed_block& block, int first_slab = 0) const {
    constexpr int bytes = of_values ? plan.value_bytes : plan.kv_bytes;
    constexpr int slabs = of_values ? plan.value_slabs : plan.stage_slabs;
    constexpr int slab_columns = of_values ? plan.value_slab_columns : plan.slab_columns;
    constexpr int row_bytes = of_values ? plan.value_row_bytes : plan.row_bytes;
    const auto begin = [&] {
      to.wait_empty();
      if (warp == 0) barrier_arrive_expect(to.full_barrier(), bytes);
    };
    // `row` of matrix number `matrix`, of `rows` each.
    const auto load_rows = [&](int at, int row, int matrix, int rows) {
#pragma unroll
      for (int slab = 0; slab < slabs; ++slab) {
        const int first = (first_slab + slab) * slab_columns;
        const u32 shared = to.buffer() + (slab * bn + at) * row_bytes;
        if constexpr (plan.head_boxes) {
          tma_load(shared, map, to.full_barrier(), first, column, matrix * rows + row,
                   l2_policy::evict_normal);
        } else {
          tma_load(shared, map, to.full_barrier(), column + first, row, matrix,
                   l2_policy::evict_normal);
        }
      }
    };
    if constexpr (form.paged) {
      // TMA fills what is outside the cache, as a page that it does not have, with zeros.
      const int rows = smaller(cta.params.page, bn), first = block.number * bn;
      if (is_elected()) begin();
      for (int i = warp, at = warp * rows; at < bn;
           i += producer_warps, at += producer_warps * rows) {
        const int page = __shfl_sync(~0u, block.page, i);
        if (is_elected())
          load_rows(at, (first + at) & (cta.params.page - 1), page, cta.params.page);
      }
    } else if (is_elected()) {
      begin();
      if constexpr (form.packed_sequences()) {
        load_rows(0, tile.sequence.kv_first + block.number * bn, 0, 0);
      } else {
        load_rows(0, block.number * bn, tile.sequence.index, cta.params.kv_len);
      }
    }
  }

  // One thread.
  __device__ __forceinline__ void load_q(const attention_tile& tile, u32 phase) const {
#pragma unroll
    for (int part = 0; part < plan.q_parts; ++part) {
      const u32 full = cta.q_full(part);
      barrier_wait(cta.q_empty(part), phase ^ 1);
      barrier_arrive_expect(full, plan.q_box_bytes);
#pragma unroll
      for (int slab = 0; slab < plan.slabs; ++slab) {
        const u32 to = cta.base + part * plan.q_bytes + slab * 64 * plan.row_bytes;
        const int query = tile.sequence.q_first + cta.first_row_of(tile, part);
        if constexpr (packed_heads > 1 || plan.head_boxes) {
          // The queries of all sequences are one after the other: rows that are others' do not
          // count.
          const int first = form.packed_sequences() ? 0 : tile.sequence.index * cta.params.q_len;
          tma_load(to, cta.maps.q, full, slab * plan.slab_columns, tile.head * packed_heads,
                   first + query, l2_policy::evict_first);
        } else {
          tma_load(to, cta.maps.q, full, tile.head * plan.head_pitch + slab * plan.slab_columns,
                   query, form.packed_sequences() ? 0 : tile.sequence.index,
                   l2_policy::evict_first);
        }
      }
    }
  }

  // Asks for a tile that no CTA has, in lane 0.
  __device__ __forceinline__ u64 ask() const {
    return threadIdx.x % 32 == 0 ? atomicAdd(cta.maps.next_tile, u64{1}) : 0;
  }
  // One warp loads a tile in the order of use, so that no load waits for the release of a stage
  // that the MMA warpgroups reach only after it. Returns the next work tile from ask(), which is
  // claimed before the last block's loads. While tiles are left, a CTA holds no more than the one
  // that it is about to begin, and the MMA warpgroups have the blocks of some stages to do until
  // the claim returns.
  // `asks`: it is a tile's last chunk.
  __device__ __forceinline__ u64 load_tile(int warp, const attention_work& tile, int column,
                                           stages& k, value_stages& v, u32& q_phase,
                                           bool asks) const {
    u64 answer = 0;
    walk keys = cta.walk_of(tile, 0);
    const auto ask_at_end = [&] {
      if (config.dynamic && warp == 0 && asks && !keys.is_valid()) answer = ask();
    };
    if (!keys.is_valid()) {
      ask_at_end();
      return answer;
    }
    const int of_values = value_column(tile, column);
    int page = page_of_lane(tile, keys.block());
    const auto next = [&] {
      const placed_block block{keys.block(), page};
      keys.next(cta.params, tile, 0);
      if (keys.is_valid()) page = page_of_lane(tile, keys.block());
      ask_at_end();
      return block;
    };
    placed_block before = next();
    load_block(warp, k, cta.maps.k, tile, column, before);
    if (warp == 0 && is_elected()) load_q(tile, q_phase);
    k.advance();
    q_phase ^= 1;
    while (keys.is_valid()) {
      const placed_block block = next();
      load_block(warp, k, cta.maps.k, tile, column, block);
      load_block<other_values>(warp, v, cta.maps.v, tile, of_values, before);
      before = block;
      k.advance();
      v.advance();
    }
    load_block<other_values>(warp, v, cta.maps.v, tile, of_values, before);
    v.advance();
    __syncwarp();
    return answer;
  }

  // The number of the tile. Who asked before the counter counted asks again.
  __device__ __forceinline__ int number_of(u64 answer) const {
    using counter = attention_tile_counter;
    if (threadIdx.x % 32 == 0) {
      while (!counter::counts(answer)) answer = ask();
    }
    return static_cast<int>(gridDim.x) +
           __shfl_sync(~0u, static_cast<int>(answer - counter::mark), 0);
  }
  // divided: the chunks of all tiles in fixed turns, the first chunk of each tile first.
  __device__ __forceinline__ void produce_chunks(scheduler& work, tile_slots& tiles, stages& k,
                                                 value_stages& v) const {
    const int lane = static_cast<int>(threadIdx.x % 32), all = work.count();
    int longest = form.lengths ? 0 : cta.params.kv_len;
    if constexpr (form.lengths) {
      for (int i = lane; i < cta.params.batch; i += 32) {
        longest = larger(longest, sequence_of<form>(cta.params, i).kv_len);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        longest = larger(longest, __shfl_xor_sync(~0u, longest, step));
      }
    }
    const int items = all * ceil_div(longest, chunk), grid = static_cast<int>(gridDim.x);
    u32 q_phase = 0;
    for (int item = static_cast<int>(blockIdx.x); item < items; item += grid) {
      work.take(item % all);
      const attention_work tile = cta.placed(work.tile(), item / all);
      if (!cta.walk_of(tile, 0).is_valid()) continue;
      if (lane == 0) cta.publish(tiles, true, tile);
      tiles.advance();
      load_tile(0, tile, kv_column(tile), k, v, q_phase, true);
    }
    if (lane == 0) cta.publish(tiles, false, cta.placed(work.tile(), 0));
  }

  // One warp: the first.
  __device__ __forceinline__ void produce() const {
    const bool first_lane = threadIdx.x % 32 == 0;
    stages k = cta.k_pipe();
    value_stages v = cta.v_pipe();
    tile_slots tiles = cta.tile_pipe();
    u32 q_phase = 0;
    // Work that reads no memory runs before the wait.
    constexpr bool reads = form.packed_sequences() || form.lengths;
    if constexpr (reads) wait_for_dependencies();
    scheduler work(cta.params);
    int column = kv_column(work.tile());
    if constexpr (!reads) wait_for_dependencies();
    if constexpr (config.dynamic) {
      if (blockIdx.x == 0 && first_lane)
        atomicExch(cta.maps.next_tile, attention_tile_counter::mark);
    }
    if constexpr (divided) {
      produce_chunks(work, tiles, k, v);
      return;
    }
    for (;;) {
      attention_work tile = cta.placed(work.tile(), 0);
      const auto chunks = cta.chunks_of(tile);
      u64 answer = 0;
      for (tile.chunk = chunks.last; tile.chunk >= chunks.first; --tile.chunk) {
        if (first_lane) cta.publish(tiles, work.is_valid(), tile);
        tiles.advance();
        if (!work.is_valid()) return;
        answer = load_tile(0, tile, column, k, v, q_phase, tile.chunk == chunks.first);
      }
      if constexpr (config.dynamic) {
        const int index = number_of(answer);
        work.take(index);
        // Each tile lets one CTA ask: the last to ask has the last number.
        const bool was_last = index - static_cast<int>(gridDim.x) == work.count() - 1;
        if (first_lane && !work.is_valid() && was_last) *cta.maps.next_tile = 0;
      } else {
        work.next();
      }
      column = kv_column(work.tile());
    }
  }

  // One of the other warps.
  __device__ __forceinline__ void assist(int warp) const {
    stages k = cta.k_pipe();
    value_stages v = cta.v_pipe();
    tile_slots tiles = cta.tile_pipe();
    u32 q_phase = 0;
    for (;;) {
      const attention_work tile = cta.published(tiles);
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(tiles.empty_barrier());
      tiles.advance();
      if (tile.first_row == cta_type::no_tile) return;
      load_tile(warp, tile, kv_column(tile), k, v, q_phase, true);
    }
  }
};

}  // namespace fftune
