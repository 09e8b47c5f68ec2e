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
#include "attention/key_walk.cuh"
#include "attention/sm90/chunks.cuh"
#include "attention/sm90/config.cuh"
#include "attention/sm90/params.cuh"
#include "attention/sm90/value_widths.cuh"
#include "attention/softmax.cuh"
#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/numerics.cuh"

namespace fftune {

template <attention_form form_, attention_sm90_config config_>
struct attention_sm90_traits {
  static constexpr attention_form form = form_;
  static constexpr attention_sm90_config config = config_;
  static constexpr attention_sm90_plan plan = attention_sm90_plan_of(form_, config_);
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
struct attention_forward {
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
  using scheduler = attention_tile_scheduler<form, plan.bm, config.ctas_per_sm, packed_heads>;
  using tile_slots = pipeline<1, plan.tile_bytes>;
  using exchange_slot = pipeline<1, plan.exchange_bytes>;
  // The part of a pair with the last queries sees every key that the other part sees.
  using walk = key_walk<form, pairs ? 64 : plan.bm, part_queries, bn>;

  const attention_sm90_params& maps;
  const attention_params& params;
  u32 base;  // of shared memory

  __device__ __forceinline__ u32 q_full(int part) const {
    return base + plan.q_barriers_at + part * 8;
  }
  __device__ __forceinline__ u32 q_empty(int part) const {
    return base + plan.q_barriers_at + (plan.q_parts + part) * 8;
  }
  __device__ __forceinline__ stages pipe(int buffers_at, int barriers_at) const {
    return {base + buffers_at, base + barriers_at, base + barriers_at + config.stages * 8};
  }
  __device__ __forceinline__ stages k_pipe() const { return pipe(plan.k_at, plan.k_barriers_at); }
  __device__ __forceinline__ stages v_pipe() const { return pipe(plan.v_at, plan.v_barriers_at); }

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

  // --- Producer warp ---

  // Where the keys and values of a tile's head begin in their rows: a column, or of boxes of heads
  // the number of that box.
  __device__ __forceinline__ int kv_column(const attention_tile& tile) const {
    const int kv_head = packed_heads > 1 ? tile.head : tile.head / (params.heads / params.kv_heads);
    return kv_head * (plan.head_boxes ? params.kv_head / form.dim : params.kv_head);
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
    const int shift = __ffs(params.page) - 1;
    const int last = larger(tile.sequence.kv_len - 1, 0) >> shift;
    const int row = block * bn + static_cast<int>(threadIdx.x % 32) * smaller(params.page, bn);
    const int page = page_table(params, tile.sequence.index)[smaller(row >> shift, last)];
    // Tokens of all pages are one after the other: those of a page that there is not are before.
    if constexpr (plan.head_boxes) return has_page(params, page) ? page : -1;
    return page;
  }

  // One warp of the producer: its share of the keys or values of a block. The first warp expects
  // the bytes of all: no phase completes before it has.
  __device__ __forceinline__ void load_block(int warp, const stages& to, const tensor_map& map,
                                             const attention_tile& tile, int column,
                                             const placed_block& block, int first_slab = 0) const {
    const auto begin = [&] {
      to.wait_empty();
      if (warp == 0) barrier_arrive_expect(to.full_barrier(), plan.kv_bytes);
    };
    // `row` of matrix number `matrix`, of `rows` each.
    const auto load_rows = [&](int at, int row, int matrix, int rows) {
#pragma unroll
      for (int slab = 0; slab < plan.stage_slabs; ++slab) {
        const int first = (first_slab + slab) * plan.slab_columns;
        const u32 shared = to.buffer() + (slab * bn + at) * plan.row_bytes;
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
      const int rows = smaller(params.page, bn), first = block.number * bn;
      if (is_elected()) begin();
      for (int i = warp, at = warp * rows; at < bn;
           i += producer_warps, at += producer_warps * rows) {
        const int page = __shfl_sync(~0u, block.page, i);
        if (is_elected()) load_rows(at, (first + at) & (params.page - 1), page, params.page);
      }
    } else if (is_elected()) {
      begin();
      if constexpr (form.packed_sequences()) {
        load_rows(0, tile.sequence.kv_first + block.number * bn, 0, 0);
      } else {
        load_rows(0, block.number * bn, tile.sequence.index, params.kv_len);
      }
    }
  }

  // One thread.
  __device__ __forceinline__ void load_q(const attention_tile& tile, u32 phase) const {
#pragma unroll
    for (int part = 0; part < plan.q_parts; ++part) {
      const u32 full = q_full(part);
      barrier_wait(q_empty(part), phase ^ 1);
      barrier_arrive_expect(full, plan.q_box_bytes);
#pragma unroll
      for (int slab = 0; slab < plan.slabs; ++slab) {
        const u32 to = base + part * plan.q_bytes + slab * 64 * plan.row_bytes;
        const int query = tile.sequence.q_first + first_row_of(tile, part);
        if constexpr (packed_heads > 1 || plan.head_boxes) {
          // The queries of all sequences are one after the other: rows that are others' do not
          // count.
          const int first = form.packed_sequences() ? 0 : tile.sequence.index * params.q_len;
          tma_load(to, maps.q, full, slab * plan.slab_columns, tile.head * packed_heads,
                   first + query, l2_policy::evict_first);
        } else {
          tma_load(to, maps.q, full, tile.head * plan.head_pitch + slab * plan.slab_columns, query,
                   form.packed_sequences() ? 0 : tile.sequence.index, l2_policy::evict_first);
        }
      }
    }
  }

  // Asks for a tile that no CTA has, in lane 0.
  __device__ __forceinline__ u64 ask() const {
    return threadIdx.x % 32 == 0 ? atomicAdd(maps.next_tile, u64{1}) : 0;
  }
  // One warp loads a tile in the order of use, so that no load waits for the release of a stage
  // that the MMA warpgroups reach only after it. Returns the next work tile from ask(), which is
  // claimed before the last block's loads. While tiles are left, a CTA holds no more than the one
  // that it is about to begin, and the MMA warpgroups have the blocks of some stages to do until
  // the claim returns.
  // `asks`: it is a tile's last chunk.
  __device__ __forceinline__ u64 load_tile(int warp, const attention_work& tile, int column,
                                           stages& k, stages& v, u32& q_phase, bool asks) const {
    u64 answer = 0;
    walk keys = walk_of(tile, 0);
    const auto ask_at_end = [&] {
      if (config.dynamic && warp == 0 && asks && !keys.is_valid()) answer = ask();
    };
    if (!keys.is_valid()) {
      ask_at_end();
      return answer;
    }
    int page = page_of_lane(tile, keys.block());
    const auto next = [&] {
      const placed_block block{keys.block(), page};
      keys.next(params, tile, 0);
      if (keys.is_valid()) page = page_of_lane(tile, keys.block());
      ask_at_end();
      return block;
    };
    placed_block before = next();
    load_block(warp, k, maps.k, tile, column, before);
    if (warp == 0 && is_elected()) load_q(tile, q_phase);
    k.advance();
    q_phase ^= 1;
    while (keys.is_valid()) {
      const placed_block block = next();
      load_block(warp, k, maps.k, tile, column, block);
      load_block(warp, v, maps.v, tile, column, before);
      before = block;
      k.advance();
      v.advance();
    }
    load_block(warp, v, maps.v, tile, column, before);
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

  // divided: the chunks of all tiles in fixed turns, the first chunk of each tile first.
  __device__ __forceinline__ void produce_chunks(scheduler& work, tile_slots& tiles, stages& k,
                                                 stages& v) const {
    const int lane = static_cast<int>(threadIdx.x % 32), all = work.count();
    int longest = form.lengths ? 0 : params.kv_len;
    if constexpr (form.lengths) {
      for (int i = lane; i < params.batch; i += 32) {
        longest = larger(longest, sequence_of<form>(params, i).kv_len);
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
      const attention_work tile = placed(work.tile(), item / all);
      if (!walk_of(tile, 0).is_valid()) continue;
      if (lane == 0) publish(tiles, true, tile);
      tiles.advance();
      load_tile(0, tile, kv_column(tile), k, v, q_phase, true);
    }
    if (lane == 0) publish(tiles, false, placed(work.tile(), 0));
  }

  // One warp: the first.
  __device__ __forceinline__ void produce() const {
    const bool first_lane = threadIdx.x % 32 == 0;
    stages k = k_pipe(), v = v_pipe();
    tile_slots tiles = tile_pipe();
    u32 q_phase = 0;
    // Work that reads no memory runs before the wait.
    constexpr bool reads = form.packed_sequences() || form.lengths;
    if constexpr (reads) wait_for_dependencies();
    scheduler work(params);
    int column = kv_column(work.tile());
    if constexpr (!reads) wait_for_dependencies();
    if constexpr (config.dynamic) {
      if (blockIdx.x == 0 && first_lane) atomicExch(maps.next_tile, attention_tile_counter::mark);
    }
    if constexpr (divided) {
      produce_chunks(work, tiles, k, v);
      return;
    }
    for (;;) {
      attention_work tile = placed(work.tile(), 0);
      const chunk_range chunks = chunks_of(tile);
      u64 answer = 0;
      for (tile.chunk = chunks.last; tile.chunk >= chunks.first; --tile.chunk) {
        if (first_lane) publish(tiles, work.is_valid(), tile);
        tiles.advance();
        if (!work.is_valid()) return;
        answer = load_tile(0, tile, column, k, v, q_phase, tile.chunk == chunks.first);
      }
      if constexpr (config.dynamic) {
        const int index = number_of(answer);
        work.take(index);
        // Each tile lets one CTA ask: the last to ask has the last number.
        const bool was_last = index - static_cast<int>(gridDim.x) == work.count() - 1;
        if (first_lane && !work.is_valid() && was_last) *maps.next_tile = 0;
      } else {
        work.next();
      }
      column = kv_column(work.tile());
    }
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

  // One of the other warps.
  __device__ __forceinline__ void assist(int warp) const {
    stages k = k_pipe(), v = v_pipe();
    tile_slots tiles = tile_pipe();
    u32 q_phase = 0;
    for (;;) {
      const attention_work tile = published(tiles);
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(tiles.empty_barrier());
      tiles.advance();
      if (tile.first_row == no_tile) return;
      load_tile(warp, tile, kv_column(tile), k, v, q_phase, true);
    }
  }

  // --- MMA warpgroups ---

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

  static __device__ __forceinline__ int warpgroup_of_thread() {
    return __shfl_sync(~0u, threadIdx.x / 128, 0);
  }
  // The first of a thread's two rows among the 64 of its warpgroup; the other is 8 below.
  static __device__ __forceinline__ int own_row() {
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  }
  // The part of a tile's queries that this thread's rows are of, and the first of them.
  static __device__ __forceinline__ int own_part() {
    return part_of(warpgroup_of_thread());
  }
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
  static __device__ __forceinline__ int own_column() {
    return threadIdx.x % 4 * 2;
  }

  static __device__ __forceinline__ void release(u32 empty_barrier) {
    if (threadIdx.x % 128 == 0) barrier_arrive(empty_barrier);
  }

  __device__ __forceinline__ void issue_scores(score_accumulators& scores, u32 k) const {
    const u64 q_rows = wgmma_swizzled_descriptor<plan.row_bytes>(base + own_part() * plan.q_bytes);
    const u64 k_rows = wgmma_swizzled_descriptor<plan.row_bytes>(k);
    constexpr int in_slab = plan.slab_columns / 16;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < plan.score_steps; ++step) {
      const int slab = step / in_slab, at = step % in_slab * 32;
      wgmma<T, bn>(scores, wgmma_advance(q_rows, slab * 64 * plan.row_bytes + at),
                   wgmma_advance(k_rows, slab * bn * plan.row_bytes + at), step > 0 ? 1 : 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_values(out_accumulators& out, const probabilities& from,
                                               u32 v, int accumulate) const {
    const u64 v_rows = wgmma_swizzled_descriptor<plan.row_bytes, bn * plan.row_bytes>(v);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < bn / 16; ++step) {
      multiply_by_values<T, plan.out_columns>(out, from[step],
                                              wgmma_advance(v_rows, step * 16 * plan.row_bytes),
                                              step > 0 ? 1 : accumulate);
    }
    wgmma_commit();
  }

  // Overwrites with zeros what a block of values has from key `count` on. Each MMA warpgroup that
  // reads it does, so that it need not wait for another: they write the same.
  __device__ __forceinline__ void zero_fill(u32 v, int count) const {
    constexpr int vectors_row = plan.row_bytes / 16;
    const int vectors = (bn - count) * vectors_row;  // of a slab
    for (int i = threadIdx.x % 128; i < plan.slabs * vectors; i += 128) {
      const int slab = i / vectors;
      store_shared(
          v + slab * bn * plan.row_bytes + count * plan.row_bytes + (i - slab * vectors) * 16,
          make_float4(0, 0, 0, 0));
    }
    async_proxy_fence();
    named_barrier_sync(static_cast<int>(attention_barrier::zero_fill) + warpgroup_of_thread(), 128);
  }
  __device__ __forceinline__ void zero_foreign(const attention_tile& tile, u32 v, int block) const {
    // Boxes of heads take the tokens of all sequences one after the other.
    if constexpr (form.foreign_keys() || plan.head_boxes) {
      const int count = tile.sequence.kv_len - block * bn;
      if (count < bn) zero_fill(v, splits ? larger(0, count) : count);
    }
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

  // Keeps everything that `value`, which is not negative, is computed from before the next wait for
  // MMAs: ptxas would move it below, to where the tensor cores are idle. The store never happens.
  __device__ __forceinline__ void complete_before_wait(float value) const {
    asm volatile(
        "{.reg .pred never;\n"
        "setp.lt.f32 never, %0, 0f00000000;\n"
        "@never st.shared.f32 [%1], %0;}" ::"f"(value),
        "r"(base)
        : "memory");
  }

  // The bits of a thread's rows and a block of keys, the first of the thread's columns lowest.
  __device__ __forceinline__ void load_mask(const attention_tile& tile, int block,
                                            mask_words& words) const {
    if constexpr (packed) {
      const packed_mask mask(params, tile.sequence.index, tile.head);
      const int first_query = own_first_query(tile);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = smaller(query_of(first_query, i), params.q_len - 1);
        const u32* const from = mask.row_bits(row, block * bn);
#pragma unroll
        for (int w = 0; w < bn / 32; w += 2) {
          const uint2 pair = *reinterpret_cast<const uint2*>(from + w);
          words.row[i][w] = pair.x;
          words.row[i][w + 1] = pair.y;
        }
      }
    }
  }

  // Soft cap and bias.
  __device__ __forceinline__ void transform(score_accumulators& scores, const attention_tile& tile,
                                            int block, const score_scaling<form>& scaling) const {
    if constexpr (form.softcap) {
#pragma unroll
      for (int i = 0; i < plan.score_registers; ++i) scores[i] = scaling.cap(scores[i]);
    }
    if constexpr (form.bias) {
      const T* const bias =
          static_cast<const T*>(params.bias) + tile.sequence.index * params.bias_batch;
      const bool pairs =
          params.bias_row % 2 == 0 && params.bias_head % 2 == 0 && params.bias_batch % 2 == 0;
      const int left = tile.sequence.kv_len - block * bn - own_column();
      const int first_query = own_first_query(tile);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = smaller(larger(0, query_of(first_query, i)), tile.sequence.q_len - 1);
        const T* const from = bias + head_of(tile, i) * params.bias_head +
                              static_cast<i64>(row) * params.bias_row + block * bn + own_column();
#pragma unroll
        for (int j = 0; j < bn / 8; ++j) {
          float first = 0, second = 0;
          if (pairs) {
            if (j * 8 < left) unpack<T>(*reinterpret_cast<const u32*>(from + j * 8), first, second);
          } else {
            if (j * 8 < left) first = to_float(from[j * 8]);
            if (j * 8 + 1 < left) second = to_float(from[j * 8 + 1]);
          }
          scores[j * 4 + i * 2] = scaling.add_bias(scores[j * 4 + i * 2], first);
          scores[j * 4 + i * 2 + 1] = scaling.add_bias(scores[j * 4 + i * 2 + 1], second);
        }
      }
    }
  }

  __device__ __forceinline__ void apply_mask(score_accumulators& scores, const attention_tile& tile,
                                             int block, const mask_words& words) const {
    const int start = block * bn + own_column(), first_query = own_first_query(tile);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const key_range keys = keys_of_row<form>(params, tile.sequence, query_of(first_query, i));
      const int first = keys.first - start, last = keys.last - start;
#pragma unroll
      for (int j = 0; j < bn / 8; ++j) {
        u32 bits = 0;
        if constexpr (packed) bits = words.row[i][j / 4] >> own_column();
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[j * 4 + i * 2 + e];
          bool visible = true;
          if constexpr (has_ranges) visible = j * 8 + e < last;
          if constexpr (form.window) visible = visible && j * 8 + e >= first;
          if constexpr (packed) visible = visible && (bits >> (j % 4 * 8 + e) & 1) != 0;
          if (!visible) score = minus_infinity();
        }
      }
    }
  }

  // Turns scores into powers of two and adds them up. Returns whether the rows of this warp have
  // been given other references, and by how much their sums of values are to be multiplied.
  template <bool is_first>
  __device__ __forceinline__ bool exponentiate(score_accumulators& scores, tile_rows& rows,
                                               float factor, float (&rescale)[2]) const {
    float largest[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most[2] = {scores[i * 2], scores[i * 2 + 1]};
#pragma unroll
      for (int j = 1; j < bn / 8; ++j) {
        most[0] = fmaxf(most[0], scores[j * 4 + i * 2]);
        most[1] = fmaxf(most[1], scores[j * 4 + i * 2 + 1]);
      }
      largest[i] = fmaxf(most[0], most[1]);
    }
    const auto of_row = [&] {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], step));
        }
      }
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) largest[i] *= factor;
    bool rescales = false;
    if constexpr (is_first) {
      of_row();
#pragma unroll
      for (int i = 0; i < 2; ++i) rows.softmax[i] = {largest[i], 0};
    } else {
      // If no thread's own scores exceed the references, those of rows do not.
      rescales = __any_sync(
          ~0u, rows.softmax[0].exceeded_by(largest[0]) || rows.softmax[1].exceeded_by(largest[1]));
      if (rescales) {
        of_row();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          rescale[i] = rows.softmax[i].rescale_if_exceeded(largest[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float offset = rows.softmax[i].offset();
      float sums[2] = {rows.softmax[i].sum, 0};
#pragma unroll
      for (int j = 0; j < bn / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[j * 4 + i * 2 + e];
          score = approximate_exp2(__fmaf_rn(score, factor, -offset));
          sums[e] += score;
        }
      }
      rows.softmax[i].sum = sums[0] + sums[1];
    }
    return rescales;
  }

  static __device__ __forceinline__ void convert(const score_accumulators& scores,
                                                 probabilities& to) {
#pragma unroll
    for (int i = 0; i < plan.score_registers / 2; ++i) {
      to[i / 4][i % 4] = pack<T>(scores[i * 2], scores[i * 2 + 1]);
    }
  }

  // Where one of a thread's rows is stored; null if the sequence has no such row, or the part none.
  __device__ __forceinline__ T* out_row(const attention_tile& tile, int first_query, int i) const {
    const int row = query_of(first_query, i);
    if (row < 0 || row >= tile.sequence.q_len) return nullptr;
    if (64 % packed_heads != 0 && own_row() + i * 8 >= part_queries * packed_heads) return nullptr;
    T* const out = static_cast<T*>(params.out) + head_of(tile, i) * form.dim;
    const i64 in_tensor = tile.sequence.q_first + row;
    return out + in_tensor * params.out_row +
           (form.packed_sequences() ? 0 : tile.sequence.index * params.out_batch);
  }
  __device__ __forceinline__ void store_lse(const attention_tile& tile, int first_query, int i,
                                            float power) const {
    if constexpr (form.lse) {
      const int head = head_of(tile, i);
      const i64 matrix = form.packed_sequences()
                             ? head
                             : static_cast<i64>(tile.sequence.index) * params.heads + head;
      params.lse[matrix * params.q_len + tile.sequence.q_first + query_of(first_query, i)] =
          power * natural_log_of_2;
    }
  }

  // The logit of one of a thread's rows that joins the denominator.
  __device__ __forceinline__ float sink_of(const attention_tile& tile, int i) const {
    return form.sinks ? params.sinks[head_of(tile, i)] : minus_infinity();
  }

  // Values of one of a thread's two rows: pairs of neighbouring columns, 8 columns apart.
  // Those of 32 columns are stored together: behind the last one are zeros.
  static constexpr int row_parts = (plan.out_columns + 31) / 32;
  using row_values = float[row_parts * 8];
  static constexpr bool stores_all = form.dim == row_parts * 32 * plan.column_parts;
  static __device__ __forceinline__ float value_of(const out_accumulators& out, int i, int at) {
    const int number = at / 2 * 4 + i * 2 + at % 2;
    return number < plan.out_registers ? out[number] : 0.0f;
  }
  // Four of a row's values, as they are kept in shared memory.
  static constexpr int row_vectors = (form.dim + 15) / 16;
  static __device__ __forceinline__ void clear_behind(row_values& sums) {
#pragma unroll
    for (int at = row_vectors * 4; at < row_parts * 8; ++at) sums[at] = 0.0f;
  }

  // split_keys: gives the other MMA warpgroup one of a thread's rows, and adds to the other row
  // what that one has of it.
  __device__ __forceinline__ softmax_row exchange(const out_accumulators& out, tile_rows& rows,
                                                  row_values& sums) const {
    const int warpgroup = warpgroup_of_thread(), thread = threadIdx.x % 128;
    const bool second = warpgroup != 0;
    exchange_slot to = exchange_from(warpgroup), from = exchange_from(1 - warpgroup);
    to.phase = from.phase = rows.exchange_phase;
    rows.exchange_phase ^= 1;
    const u32 given = to.buffer(), taken = from.buffer();
    constexpr int vectors = row_vectors, row_at = vectors * 128 * 16;
    to.wait_empty();
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      float vector[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float low = value_of(out, 0, i * 4 + j), high = value_of(out, 1, i * 4 + j);
        vector[j] = second ? low : high;
        sums[i * 4 + j] = second ? high : low;
      }
      store_shared(given + (i * 128 + thread) * 16,
                   make_float4(vector[0], vector[1], vector[2], vector[3]));
    }
    const softmax_row low = rows.softmax[0], high = rows.softmax[1];
    softmax_row own = second ? high : low;
    store_shared(given + row_at + thread * 8,
                 second ? float2{low.reference, low.sum} : float2{high.reference, high.sum});
    barrier_arrive(to.full_barrier());
    from.wait_full();
    const float2 pair = load_shared_pair(taken + row_at + thread * 8);
    softmax_row other{pair.x, pair.y};
    const float own_factor = own.rescale(other.reference);
    const float other_factor = other.rescale(own.reference);
    own.sum += other.sum;
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const float4 vector = load_shared(taken + (i * 128 + thread) * 16);
      const float values[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& sum = sums[i * 4 + j];
        sum = sum * own_factor + values[j] * other_factor;
      }
    }
    barrier_arrive(from.empty_barrier());
    clear_behind(sums);
    return own;
  }

  // Stores 8 columns of a row from `column` on, which its head may not all have. Heads are aligned
  // to no more than their features are.
  static __device__ __forceinline__ void store_columns(T* row, int column, const u32 (&word)[4]) {
    constexpr int bytes = attention_access_bytes(form.dim);
    T* const to = row + column;
    if constexpr (bytes == 16) {
      if (stores_all || column < form.dim) {
        *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    } else if constexpr (bytes == 8) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        if (column + i * 2 < form.dim) {
          *reinterpret_cast<uint2*>(to + i * 2) = make_uint2(word[i], word[i + 1]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column + i * 2 < form.dim) *reinterpret_cast<u32*>(to + i * 2) = word[i];
      }
    }
  }

  // Four threads have neighbouring pairs of columns of a row. They exchange, so that each has 8
  // neighbouring columns of 32 and stores 16 bytes.
  __device__ __forceinline__ void store_row(const row_values& sums, softmax_row total,
                                            const attention_tile& tile, int first_query, int i,
                                            int first_column = 0) const {
    const int quarter = threadIdx.x % 4;
    total.sum += __shfl_xor_sync(~0u, total.sum, 1);
    total.sum += __shfl_xor_sync(~0u, total.sum, 2);
    const softmax_result result = finish_softmax(total, sink_of(tile, i));
    T* const to = out_row(tile, first_query, i);
    if (to != nullptr && quarter == 0 && first_column == 0)
      store_lse(tile, first_query, i, result.lse);
#pragma unroll
    for (int part = 0; part < row_parts; ++part) {
      u32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = part * 8 + j * 2;
        word[j] = pack<T>(sums[at] * result.factor, sums[at + 1] * result.factor);
      }
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        const bool upper = (quarter & step) != 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if ((j & step) != 0) continue;
          const u32 sent = upper ? word[j] : word[j + step];
          const u32 received = __shfl_xor_sync(~0u, sent, step);
          if (upper) {
            word[j] = received;
          } else {
            word[j + step] = received;
          }
        }
      }
      if (to != nullptr) store_columns(to, first_column + part * 32 + quarter * 8, word);
    }
  }

  // divided: leaves what a thread has of its two rows for attention_chunk_sums_sm90.
  __device__ __forceinline__ void leave(const out_accumulators& out, const attention_work& tile,
                                        const tile_rows& rows) const {
    const int first_query = own_first_query(tile), quarter = threadIdx.x % 4;
    const i64 queries = static_cast<i64>(params.batch) * params.q_len;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (out_row(tile, first_query, i) == nullptr) continue;
      const i64 query =
          static_cast<i64>(tile.sequence.index) * params.q_len + query_of(first_query, i);
      float* const to = reinterpret_cast<float*>(params.partials) +
                        ((tile.chunk * queries + query) * params.heads + head_of(tile, i)) *
                            attention_chunk_row(form);
#pragma unroll
      for (int at = 0; at < plan.out_columns / 4; at += 2) {
        *reinterpret_cast<float2*>(to + at / 2 * 8 + own_column()) =
            float2{value_of(out, i, at), value_of(out, i, at + 1)};
      }
      to[plan.out_columns + quarter] = rows.softmax[i].sum;
      to[plan.out_columns + 4 + quarter] = rows.softmax[i].reference;
    }
  }

  // Chunks: adds what a thread has of row i to its sums over those before.
  __device__ __forceinline__ void add_up(const out_accumulators& out, tile_rows& rows, int i,
                                         bool is_first, bool is_last, row_values& sums) const {
    softmax_row& all = rows.of_chunks[i];
    if (is_first) all = {};
    const chunk_factors by = chunk_factors_of(all.reference, rows.softmax[i].reference);
    all.sum = add_chunk(all.sum, rows.softmax[i].sum, by);
    constexpr int vectors = row_vectors;
#pragma unroll
    for (int vector = 0; vector < vectors; ++vector) {
      const u32 place = base + plan.sums_at + warpgroup_of_thread() * plan.sums_bytes +
                        ((i * vectors + vector) * 128 + threadIdx.x % 128) * 16;
      float4 four = make_float4(0, 0, 0, 0);
      if (!is_first) four = load_shared(place);
      const float before[4] = {four.x, four.y, four.z, four.w};
      float* const now = sums + vector * 4;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        now[j] = add_chunk(before[j], value_of(out, i, vector * 4 + j), by);
      }
      if (!is_last) store_shared(place, make_float4(now[0], now[1], now[2], now[3]));
    }
    clear_behind(sums);
  }

  __device__ __forceinline__ void store(const out_accumulators& out, const attention_work& tile,
                                        tile_rows& rows) const {
    if constexpr (divided) {
      leave(out, tile, rows);
      return;
    }
    const int first_query = own_first_query(tile);
    row_values sums;
    if constexpr (chunk > 0) {
      const chunk_range chunks = chunks_of(tile);
      const bool is_first = tile.chunk == chunks.last, is_last = tile.chunk == chunks.first;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        add_up(out, rows, i, is_first, is_last, sums);
        if (is_last) store_row(sums, rows.of_chunks[i], tile, first_query, i);
      }
    } else if constexpr (splits) {
      const softmax_row total = exchange(out, rows, sums);
      store_row(sums, total, tile, first_query, warpgroup_of_thread());
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int at = 0; at < row_parts * 8; ++at) sums[at] = value_of(out, i, at);
        store_row(sums, rows.softmax[i], tile, first_query, i);
      }
    }
  }

  // A tile whose rows see no key.
  __device__ __forceinline__ void store_empty(const attention_tile& tile) const {
    if (splits && warpgroup_of_thread() != 0) return;
    const int quarter = threadIdx.x % 4, first_query = own_first_query(tile);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      T* const to = out_row(tile, first_query, i);
      if (to == nullptr) continue;
      if (quarter == 0) store_lse(tile, first_query, i, sink_of(tile, i) * log2_e);
#pragma unroll
      for (int part = 0; part < row_parts; ++part) {
        store_columns(to, part * 32 + quarter * 8, {0, 0, 0, 0});
      }
    }
  }

  // The next tile that has key blocks; those that have none are stored. All threads of an MMA
  // warpgroup.
  __device__ __forceinline__ bool next_tile(tile_slots& tiles, attention_work& tile,
                                            walk& keys) const {
    for (;;) {
      tile = published(tiles);
      barrier_arrive(tiles.empty_barrier());
      tiles.advance();
      if (tile.first_row == no_tile) return false;
      keys = walk_of(tile, own_part());
      if constexpr (splits) keys.skip(warpgroup_of_thread());
      if (keys.is_valid()) return true;
      store_empty(tile);
    }
  }

  // The work of an MMA warpgroup.
  __device__ __forceinline__ void compute() const {
    const int warpgroup = warpgroup_of_thread(), part = part_of(warpgroup);
    const score_scaling<form> scaling(params);
    stages k = k_pipe();
    if constexpr (splits) k.advance(warpgroup);
    u32 q_phase = 0;
    tile_slots tiles = tile_pipe();
    attention_work tile = {};
    walk keys(params, tile, 0);
    if (!next_tile(tiles, tile, keys)) return;
    if (warpgroup == warpgroups - 1) pass_turn(warpgroup);  // the first one begins

    alignas(16) score_accumulators scores;
    alignas(16) out_accumulators out;
    probabilities from;
    tile_rows rows;
    mask_words words;
    const auto next_block = [&] {
      if constexpr (splits) {
        keys.skip(stride);
      } else {
        keys.next(params, tile, first_row_of(tile, part) - tile.first_row);
      }
    };
    const auto release_k = [&](bool was_last) {
      release(k.empty_barrier());
      if constexpr (splits) {
        k.advance(stride);
      } else {
        k.advance();
      }
      if (was_last) release(q_empty(part));
    };
    // The values of a block are in use until one of this warpgroup's blocks, or two, later than its
    // keys.
    const auto values = [&](int blocks_behind) {
      stages v = k;
      v.buffers += plan.v_at - plan.k_at;
      v.full += plan.v_barriers_at - plan.k_barriers_at;
      v.empty += plan.v_barriers_at - plan.k_barriers_at;
      v.retreat(blocks_behind * stride);
      return v;
    };
    // The product with the values of block `before`, whose probabilities are there.
    int before = 0, accumulate = 0;
    const auto multiply_values = [&](const attention_work& of, int blocks_behind) {
      const stages v = values(blocks_behind);
      v.wait_full();
      zero_foreign(of, v.buffer(), before);
      issue_values(out, from, v.buffer(), accumulate);
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
          release(k.empty_barrier());
          release(values(0).empty_barrier());
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
      if constexpr (masked) load_mask(tile, block, words);
      k.wait_full();
      wait_turn();
      issue_scores(scores, k.buffer());
      multiply_values(tile, 1);
      pass_turn(warpgroup);
      wgmma_wait<1>();
      release_k(!keys.is_valid());
      transform(scores, tile, block, scaling);
      if constexpr (masked) apply_mask(scores, tile, block, words);
      float rescale[2];
      const bool rescales = exponentiate<false>(scores, rows, scaling.factor(), rescale);
      complete_before_wait(rows.softmax[0].sum + rows.softmax[1].sum);
      wgmma_wait<0>();
      release(values(2).empty_barrier());
      if (rescales) {
#pragma unroll
        for (int i = 0; i < plan.out_registers; ++i) out[i] *= rescale[i / 2 % 2];
      }
      convert(scores, from);
      before = block;
      accumulate = 1;
    };

    int passed_over = pass_over(most_blocks);
    barrier_wait(q_full(part), q_phase);
    k.wait_full();
    issue_scores(scores, k.buffer());
    load_mask(tile, keys.block(), words);
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
        transform(scores, tile, before, scaling);
        if (masked) apply_mask(scores, tile, before, words);
        float unused[2];
        exponentiate<true>(scores, rows, scaling.factor(), unused);
        convert(scores, from);
      }
      // The turns of the blocks passed over, as every warpgroup has the same number.
      for (; passed_over > 0; --passed_over) {
        wait_turn();
        pass_turn(warpgroup);
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
        wait_turn();
        multiply_values(done, 1);
        pass_turn(warpgroup);
        wgmma_wait<0>();
        release(values(1).empty_barrier());
        store(out, done, rows);
        return;
      }
      passed_over = pass_over(config.stages - 1);
      wait_turn();
      multiply_values(done, 1 + passed_over);
      pass_turn(warpgroup);
      barrier_wait(q_full(part), q_phase);
      k.wait_full();
      issue_scores(scores, k.buffer());
      load_mask(tile, keys.block(), words);
      wgmma_wait<1>();
      release(values(1 + passed_over).empty_barrier());
      store(out, done, rows);
      wgmma_wait<0>();
    }
  }

  // --- All threads ---

  // One thread.
  __device__ __forceinline__ void init_barriers() const {
#pragma unroll
    for (int part = 0; part < plan.q_parts; ++part) {
      barrier_init(q_full(part), 1);
      barrier_init(q_empty(part), stride);
    }
    const stages k = k_pipe(), v = v_pipe();
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
        const exchange_slot slot = exchange_from(warpgroup);
        barrier_init(slot.full, 128);
        barrier_init(slot.empty, 128);
      }
    }
    const tile_slots tiles = tile_pipe();
    barrier_init(tiles.full, 1);
    barrier_init(tiles.empty, 128 * warpgroups + producer_warps - 1);
    barrier_init_fence();
  }

  static __device__ __forceinline__ void run(const attention_sm90_params& params,
                                             unsigned char* memory) {
    const u32 base = (shared_address(memory) + 1023) & ~1023u;  // swizzle atoms are 1024 bytes
    const attention_forward self{params, params.attention, base};
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
      if (warp == 0) self.produce();
      if (producer_warps > 1 && warp > 0 && warp < producer_warps) {
        wait_for_dependencies();
        self.assist(warp);
      }
    } else {
      if constexpr (plan.reallocates_registers)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(int{plan.mma_registers}));
      wait_for_dependencies();
      self.compute();
    }
  }
};

}  // namespace fftune

#include "attention/sm90/wide.cuh"

namespace fftune {

template <attention_form form, attention_sm90_config config>
__global__ void __launch_bounds__(attention_sm90_plan_of(form, config).threads, config.ctas_per_sm)
    attention_forward_sm90(const __grid_constant__ attention_sm90_params params) {
  extern __shared__ unsigned char shared_memory[];
  attention_forward<attention_sm90_traits<form, config>>::run(params, shared_memory);
}

// divided: a warp adds up the chunks of a row of the result, and stores it. Four lanes
// have the sums of probabilities that the four threads of a row had, in the order of store_row().
template <attention_form form, attention_sm90_config config>
__global__ void __launch_bounds__(128)
    attention_chunk_sums_sm90(const __grid_constant__ attention_sm90_params maps) {
  using T = element_type<form.type>;
  constexpr int columns = (form.dim + 31) / 32, length = attention_chunk_row(form);
  constexpr int sums_at = length - 8;
  launch_dependents();
  wait_for_dependencies();
  const attention_params& params = maps.attention;
  const int lane = static_cast<int>(threadIdx.x % 32), quarter = lane % 4;
  const i64 rows = static_cast<i64>(params.batch) * params.q_len * params.heads;
  const i64 row = blockIdx.x * i64{4} + threadIdx.x / 32;
  if (row >= rows) return;
  const int head = static_cast<int>(row % params.heads);
  const i64 query_of_all = row / params.heads;
  const int query = static_cast<int>(query_of_all % params.q_len);
  const attention_sequence sequence =
      sequence_of<form>(params, static_cast<int>(query_of_all / params.q_len));
  const key_range keys = keys_of_row<form>(params, sequence, query);
  const int first = keys.first / config.chunk;
  const int last = keys.last > keys.first ? ceil_div(keys.last, config.chunk) : first;
  const float* const from = reinterpret_cast<const float*>(params.partials) + row * length;
  softmax_row all;
  float sums[columns] = {};
#pragma unroll 4
  for (int chunk = last - 1; chunk >= first; --chunk) {
    const float* const own = from + chunk * rows * length;
    const chunk_factors by = chunk_factors_of(all.reference, own[sums_at + 4 + quarter]);
    all.sum = add_chunk(all.sum, own[sums_at + quarter], by);
#pragma unroll
    for (int j = 0; j < columns; ++j) {
      if (form.dim % 32 == 0 || j * 32 + lane < form.dim) {
        sums[j] = add_chunk(sums[j], own[j * 32 + lane], by);
      }
    }
  }
  all.sum += __shfl_xor_sync(~0u, all.sum, 1);
  all.sum += __shfl_xor_sync(~0u, all.sum, 2);
  const softmax_result result =
      finish_softmax(all, form.sinks ? params.sinks[head] : minus_infinity());
  T* const to = static_cast<T*>(params.out) + head * form.dim +
                (query_of_all / params.q_len) * params.out_batch + query * i64{params.out_row};
#pragma unroll
  for (int j = 0; j < columns; ++j) {
    if (form.dim % 32 == 0 || j * 32 + lane < form.dim) {
      to[j * 32 + lane] = from_float<T>(sums[j] * result.factor);
    }
  }
  if constexpr (form.lse) {
    if (lane == 0) {
      params.lse[(query_of_all / params.q_len * params.heads + head) * params.q_len + query] =
          result.lse * natural_log_of_2;
    }
  }
}

}  // namespace fftune
