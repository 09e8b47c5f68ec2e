// C = epilogue(A B1^T[, A B2^T]) where a mask says for each row of A which of two sets of B it
// takes, with TMA and wgmma, for sm_90a.
//
// The engine of wgmma_gemm.cuh over the tiles of grouped_tiles.cuh: each tile has rows of one
// group, so that no row is computed twice, and the tiles of both groups are one persistent
// schedule. How many each group has is known in the kernel alone.
//
// A or C may be in the order of the groups instead (sorted_a, sorted_c), where a tile's rows are
// neighbours. Else a tile whose rows happen to be neighbours, as all but a few are under a mask of
// long runs, is copied by TMA like any other; the rows of the rest are gathered by two warps of
// the producer, and scattered by the consumers. Of several tiles of the same rows that a block has
// in turn, the first alone is gathered (wgmma_turns.cuh).
#pragma once

#include "gemm/row_tables.cuh"
#include "gemm/wgmma_gather.cuh"
#include "gemm/wgmma_gemm.cuh"
#include "gemm/wgmma_row_store.cuh"
#include "gemm/wgmma_turns.cuh"

namespace fftune {

// The operands: maps as in the plain engine, and the addresses of what is gathered and scattered.
template <class T, class Outputs>
struct grouped_operands {
  const tensor_map& a;
  const tensor_map& a1;    // of the second term
  const tensor_map& kept;  // A's rows for the other turns; unused where there is one
  const tensor_map& true_b0;
  const tensor_map& true_b1;  // of the second product or term, as that of the other group
  const tensor_map& false_b0;
  const tensor_map& false_b1;
  Outputs c;
  const u8* mask;
  const T* a_rows;
  wgmma_output_rows<T> c_rows;
};

template <class T, class Epilogue, wgmma_tile tile, bool sorted_a, bool sorted_c,
          class Operands = forward_operands, int turns = 1>
class wgmma_grouped_gemm : wgmma_gemm<T, Epilogue, tile, T, no_scales, Operands> {
  using engine = wgmma_gemm<T, Epilogue, tile, T, no_scales, Operands>;
  using typename engine::loader;
  using typename engine::ring;
  using schedule = wgmma_turns<tile, turns>;
  using store = wgmma_row_store_of<T, Epilogue, tile>;
  using tiles = grouped_tiles<tile.bm, tile.cluster_m>;
  using tables = row_tables<tile.bm>;

 public:
  using typename engine::layout;
  using operands = grouped_operands<T, typename store::base::outputs>;

 private:
  static_assert(sorted_a || tile.cluster_n == 1, "gathered rows are not multicast");
  static_assert(!Operands::a_transposed && Operands::results == 1);
  static_assert(sorted_a || Operands::terms == 1);
  static_assert(turns == 1 || (!sorted_a && !store::base::fetches));
  static constexpr int groups_barrier = 7;
  // Finding and gathering rows takes more registers than the plain engine's producer has.
  static constexpr int producer_registers = tile.consumers == 1               ? 80
                                            : tile.consumers == 2 && sorted_a ? 40
                                                                              : 56;
  static constexpr int consumer_registers = tile.consumers == 3               ? 152
                                            : tile.consumers == 1 || sorted_a ? 232
                                                                              : 224;
  static_assert(wgmma_registers_fit(tile, consumer_registers, producer_registers));

  // Where the threads of the producer warpgroup begin that each have a part of their own: B, A,
  // gathered or not, and which rows the tiles have.
  static constexpr int b_thread = 0, a_thread = 32, rows_thread = 96;
  static_assert(a_thread + wgmma_gather_threads == rows_thread);

  // In shared memory after the engine's: what row_groups needs, the tables of rows, and the
  // barriers of rows that are kept.
  static constexpr int groups_at = (layout::sums_barrier_at + 8 + 15) / 16 * 16;
  static constexpr int tables_at = groups_at + row_groups::shared_words * 4;
  static constexpr int kept_at = tables_at + tables::bytes;

  static __device__ __forceinline__ void prefetch_maps(const operands& from) {
    tma_prefetch(from.true_b0);
    tma_prefetch(from.false_b0);
    if constexpr (Epilogue::products * Operands::terms == 2) {
      tma_prefetch(from.true_b1);
      tma_prefetch(from.false_b1);
    }
    tma_prefetch(from.a);
    tma_prefetch(from.c.first());
  }

  // While the mask is on its way: both experts' weights for what should be this block's first tile,
  // and what should be its rows, into L2. Which tile it is, and of which expert, the mask decides,
  // but all of it is what some block needs, unless one expert has no rows. Of the blocks that share
  // it one in four brings it. Kernels of two products, and those that come early to wait for an
  // earlier one, do not gain by it. One thread of each of three warps, by number.
  static constexpr bool prefetches = !sorted_a && Epilogue::products == 1;
  static __device__ __forceinline__ void prefetch_first(const operands& from,
                                                        const wgmma_gemm_shape& shape, u32 rank,
                                                        int warp) {
    const schedule work({shape.m + tile.bm, shape.n, shape.k, shape.group_m});
    const tile_position at = work.position(rank);
    const bool rows = warp == 1;
    if (!work.pending() || (rows ? at.n : at.m / tile.cluster_m) % 4 != 0) return;
    const k_range range = engine::range_of(shape, rank);
    const int last = smaller(range.last, range.first + tile.stages);
    const u32 share = tile.split_k > 1 ? 0 : rank;
    const int row = at.m * tile.bm, feature = at.n * tile.bn + share * loader::b_share;
    const tensor_map& b = warp == 2 ? from.true_b0 : from.false_b0;
    for (int tile_k = range.first; tile_k < last; ++tile_k) {
      const int k = tile_k * engine::bk;
      if (rows) {
        tma_prefetch(from.a, k, row);
      } else if constexpr (Operands::b_transposed) {
#pragma unroll
        for (int slab = 0; slab < loader::b_share; slab += 64) tma_prefetch(b, feature + slab, k);
      } else {
        tma_prefetch(b, k, feature);
      }
    }
  }

  // One thread: B of every tile. It announces the bytes of A too, if they are TMA's in any case.
  static __device__ __forceinline__ void produce_b(const operands& from, const tiles& rows,
                                                   const wgmma_gemm_shape& shape, ring pipe,
                                                   u32 rank) {
    constexpr u32 bytes = sorted_a ? layout::stage_bytes : layout::stage_bytes - layout::a_bytes;
    const k_range range = engine::range_of(shape, rank);
    for (schedule work(shape); work.pending(); work.advance(1)) {
      const tile_position at = work.position(rank);
      const int group = rows.at(at.m).group;
      const loader source({from.a, group == 0 ? from.true_b0 : from.false_b0,
                           group == 0 ? from.true_b1 : from.false_b1, nullptr},
                          shape.k, rank);
      for (int tile_k = range.first; tile_k < range.last; ++tile_k, pipe.advance()) {
        barrier_wait(pipe.empty_barrier(), pipe.parity ^ 1);
        barrier_arrive_expect(pipe.full_barrier(), bytes);
        source.load_b(pipe.slot(), pipe.full_barrier(), tile_k, {at, false});
      }
    }
    // A block may not exit while peers still multicast into it or signal its barriers.
    if constexpr (layout::cluster_blocks > 1 && tile.split_k == 1) {
      for (int stage = 0; stage < tile.stages; ++stage, pipe.advance()) {
        barrier_wait(pipe.empty_barrier(), pipe.parity ^ 1);
      }
    }
  }

  // One thread: the A of every tile, in the order of the groups.
  static __device__ __forceinline__ void produce_sorted_a(const operands& from, const tiles& rows,
                                                          const wgmma_gemm_shape& shape, ring pipe,
                                                          u32 rank) {
    const k_range range = engine::range_of(shape, rank);
    const loader source({from.a, from.a, from.a, nullptr}, shape.k, rank);
    const u32 share = tile.split_k > 1 ? 0 : rank % tile.cluster_n;
    const u16 row_blocks = static_cast<u16>(((1 << tile.cluster_n) - 1) << (rank - share));
    wait_for_dependencies();
    for (schedule work(shape); work.pending(); work.advance(1)) {
      const int row = rows.at(work.position(rank).m).first + share * loader::a_share;
      for (int tile_k = range.first; tile_k < range.last; ++tile_k, pipe.advance()) {
        barrier_wait(pipe.empty_barrier(), pipe.parity ^ 1);
        loader::template load<tile.cluster_n>(
            pipe.slot() + share * loader::a_share * layout::row_bytes,
            source.of_second_term(tile_k) ? from.a1 : from.a, pipe.full_barrier(),
            source.k_of(tile_k), row, row_blocks, l2_policy::evict_normal);
      }
    }
  }

  // The gathering warps: the A of every tile, which the first of their threads has TMA copy where
  // rows are neighbours. Both warps fill every slot, so that neither is a phase behind.
  static __device__ __forceinline__ void produce_a(const operands& from,
                                                   const wgmma_gemm_shape& shape, ring pipe,
                                                   u32 base, u32 rank, tables found) {
    const k_range range = engine::range_of(shape, rank);
    const int thread = threadIdx.x % 128 - a_thread;
    const wgmma_kept_barriers kept{base + kept_at};
    bool second = false;  // turn of rows that are kept
    u32 parity = 0;
    wait_for_dependencies();
    for (schedule work(shape); work.pending(); work.advance(1)) {
      const tile_rows own = found.wait();
      const bool consecutive = own.consecutive();
      if (!consecutive && work.first()) {
        const wgmma_gather<tile.bm> gather(own.rows, thread);
        for (int tile_k = range.first; tile_k < range.last; ++tile_k, pipe.advance()) {
          barrier_wait(pipe.empty_barrier(), pipe.parity ^ 1);
          gather.template copy<1>(from.a_rows, shape.k, tile_k * engine::bk, pipe.slot());
          barrier_arrive_copied(pipe.full_barrier());
        }
      } else if (thread % 32 == 0) {
        const tensor_map& a = consecutive ? from.a : from.kept;
        const int row =
            consecutive ? own.first() : static_cast<int>(work.position(rank).m) * tile.bm;
        for (int tile_k = range.first; tile_k < range.last; ++tile_k, pipe.advance()) {
          barrier_wait(pipe.empty_barrier(), pipe.parity ^ 1);
          barrier_arrive(pipe.full_barrier(), thread == 0 ? 31 : 32);  // in place of its warp
          if (thread == 0) {
            if (second) kept.wait(tile_k, range.last, parity);
            barrier_arrive_expect(pipe.full_barrier(), layout::a_bytes);
            tma_load(pipe.slot(), a, pipe.full_barrier(), tile_k * engine::bk, row,
                     l2_policy::evict_normal);
          }
        }
      } else {
        pipe.skip(range.last - range.first);
      }
      __syncwarp();
      if (second) parity ^= 1;
      second = !consecutive && work.first() && !work.last();
      if (work.last()) found.advance();
    }
  }

  // One warp.
  static __device__ __forceinline__ void find_rows(const tiles& rows, const wgmma_gemm_shape& shape,
                                                   u32 rank, tables found) {
    for (schedule work(shape); work.pending(); work.advance_rows()) {
      found.fill(rows.groups, rows.at(work.position(rank).m));
    }
  }

  // Where rows [skipped, skipped + box_tokens) of a tile go.
  static __device__ __forceinline__ wgmma_target_rows target(const tiles& rows, u32 at,
                                                             const tables& found, int skipped) {
    const grouped_place own = rows.at(at);
    const int count = own.count - skipped;
    int first = own.first;
    if constexpr (!sorted_c) {
      const tile_rows own_rows = found.wait();
      if (!own_rows.consecutive()) return {own_rows.rows + skipped, 0, count, false};
      first = own_rows.first();
    }
    const bool last = first + own.count == rows.groups.rows();  // what follows is no row of C
    return {nullptr, first + skipped, count, count > 0 && (count >= layout::box_tokens || last)};
  }

  // As the engine's main loop, where a block has several turns. `gathered`: in this one.
  static __device__ __forceinline__ void main_loop(typename engine::sums& sum, ring& pipe,
                                                   int k_tiles, u32 first_row, u32 rank,
                                                   bool gathered, const wgmma_keeper& keeper,
                                                   const wgmma_kept_barriers& kept) {
    u32 previous = 0;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile, pipe.advance()) {
      barrier_wait(pipe.full_barrier(), pipe.parity);
      if (gathered) async_proxy_fence();
      keeper.store(pipe.slot(), k_tile * engine::bk);
      engine::multiply(sum, pipe.slot(), first_row, k_tile > 0);
      if (k_tile > 0) {
        wgmma_wait<1>();
        keeper.template wait_read<1>();
        engine::release(previous, rank);
      }
      previous = pipe.empty_barrier();
    }
    wgmma_wait<0>();
    keeper.template wait_read<0>();
    engine::release(previous, rank);
    keeper.template arrive<wgmma_kept_late>(kept.most);
  }

  static __device__ __forceinline__ void consume(const operands& from, const tiles& rows,
                                                 const wgmma_gemm_shape& shape, ring pipe, u32 base,
                                                 u32 rank, int consumer, tables found) {
    const k_range range = engine::range_of(shape, rank);
    const int k_tiles = range.last - range.first;
    const int first_row = tile.ping_pong ? 0 : consumer * layout::consumer_rows;
    typename store::base::boxes boxes{
        base + layout::output_at + consumer * layout::consumer_output_bytes,
        base + layout::output_barriers_at + consumer * tile.output_boxes * 8};
    const wgmma_kept_barriers kept{base + kept_at};
    schedule work(shape);
    if constexpr (tile.ping_pong) {
      if (consumer == 1) {
        work.advance(1);
        pipe.skip(k_tiles);
        found.advance();
        named_barrier_arrive(4, 256);  // the first consumer multiplies first
      }
    }
    constexpr u32 turn = tile.ping_pong ? 2 : 1;
    alignas(16) typename engine::sums sum;
    for (bool last = true; work.pending(); work.advance(turn), found.skip(last ? turn : 0)) {
      last = work.last();
      const tile_position at = work.position(rank);
      // What this consumer stores: a share of the tile's rows or, swapped, of its features; of a
      // split a share of the columns.
      const int share = tile.split_k > 1 ? static_cast<int>(rank) * layout::owned_columns : 0;
      const int skipped = tile.swapped ? share : first_row;
      const bool gathered = !sorted_a && work.first() && !found.wait().consecutive();
      if constexpr (tile.ping_pong) named_barrier_sync(4 + consumer, 256);
      const auto fetch = [&] {
        if constexpr (store::base::fetches) {
          store::base::fetch_residual(boxes, from.c, rows.at(at.m).first + skipped,
                                      static_cast<int>(at.n) * tile.bn);
        }
      };
      const wgmma_keeper keeper{from.kept, static_cast<int>(at.m) * tile.bm,
                                gathered && !last && threadIdx.x == 0};
      if constexpr (turns > 1) {
        main_loop(sum, pipe, k_tiles, first_row, rank, gathered, keeper, kept);
      } else {
        engine::main_loop(sum, pipe, k_tiles, first_row, rank,
                          smaller(store::base::fetch_after, k_tiles) - 1, fetch, gathered);
      }
      if constexpr (tile.ping_pong) {
        named_barrier_arrive(4 + (consumer ^ 1), 256);
        pipe.skip(k_tiles);
      }
      const int feature = static_cast<int>(at.n) * tile.bn + (tile.swapped ? first_row : share);
      const auto to = [&] { return target(rows, at.m, found, skipped); };
      if constexpr (tile.split_k > 1) {
        typename store::base::owned_sums total;
        store::base::exchange_sums(sum, total, base + layout::exchange_at,
                                   base + layout::sums_barrier_at, rank);
        if (rank >= layout::owners) return;
        store::store(total, boxes, from.c, from.c_rows, to(), feature, shape.n, 1 + consumer);
      } else {
        store::store(sum, boxes, from.c, from.c_rows, to(), feature, shape.n, 1 + consumer);
        if constexpr (turns > 1)
          keeper.template arrive<layout::boxes * Epilogue::outputs>(kept.all());
        if (last) found.release();
      }
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
  }

 public:
  // Bytes of shared memory after the layout's, 8 of which align.
  static constexpr int more_bytes =
      8 + row_groups::shared_words * 4 + tables::bytes + wgmma_kept_barriers::bytes;

  // `shape.m` counts all rows.
  static __device__ __forceinline__ void run(const operands& from, const wgmma_gemm_shape& shape,
                                             unsigned char* memory) {
    const u32 start = shared_address(memory);
    const u32 base = (start + 1023) & ~1023u;  // swizzle atoms are 1024 bytes
    unsigned char* const aligned = memory + (base - start);
    ring pipe{base, base + layout::barriers_at, base + layout::barriers_at + tile.stages * 8};
    const u32 rank = layout::cluster_blocks == 1 ? 0 : cluster_rank();
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
    const tables found(aligned + tables_at, base + tables_at);
    if (group == tile.consumers && thread > 0 && thread % 32 == 0) {
      if (thread == 64) prefetch_maps(from);
      if constexpr (prefetches) prefetch_first(from, shape, rank, thread / 32);
    }
    if (group == tile.consumers && thread == b_thread) {
      found.init(tile.ping_pong ? 4 : 4 * tile.consumers);
      if constexpr (turns > 1) wgmma_kept_barriers{base + kept_at}.init();
      engine::init_barriers(pipe, base, rank, sorted_a ? 1 : 1 + wgmma_gather_threads);
    }
    __syncwarp();
    if constexpr (layout::cluster_blocks > 1) cluster_arrive();
    // The mask is older than the kernel before this one, so it is read without a wait.
    const tiles rows{row_groups::scan<layout::threads>(
        from.mask, shape.m, reinterpret_cast<u32*>(aligned + groups_at))};
    // A split's blocks need each other only for the sums: they wait there.
    if constexpr (layout::cluster_blocks > 1 && tile.split_k == 1) cluster_wait();
    launch_dependents();
    const wgmma_gemm_shape tiled{static_cast<int>(rows.count()) * tile.bm, shape.n, shape.k,
                                 shape.group_m};
    const bool finds = group == tile.consumers && thread >= rows_thread;
    if (!finds) named_barrier_arrive(groups_barrier, layout::threads);
    if (group == tile.consumers) {
      if constexpr (!layout::light)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(producer_registers));
      if (thread == b_thread) produce_b(from, rows, tiled, pipe, rank);
      if constexpr (sorted_a) {
        if (thread == a_thread) produce_sorted_a(from, rows, tiled, pipe, rank);
      } else {
        if (thread >= a_thread && !finds) produce_a(from, tiled, pipe, base, rank, found);
      }
      if (finds) {
        named_barrier_sync(groups_barrier, layout::threads);
        find_rows(rows, tiled, rank, found);
      }
      if constexpr (tile.split_k > 1) {
        __syncwarp();
        cluster_wait();
      }
    } else {
      if constexpr (!layout::light)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(consumer_registers));
      consume(from, rows, tiled, pipe, base, rank, group, found);
    }
  }
};

}  // namespace fftune
