// C = epilogue(A B1^T[, A B2^T]) where a mask says for each row of A which of two sets of B it
// takes, with TMA and wgmma, for sm_90a.
//
// The engine of wgmma_gemm.cuh over the tiles of row_groups.cuh: each tile has rows of one group,
// so that no row is computed twice, and the tiles of both groups are one persistent schedule. How
// many each group has is known in the kernel alone.
//
// A or C may be in the order of the groups instead (sorted_a, sorted_c), where a tile's rows are
// neighbours. Else a tile whose rows happen to be neighbours, as all but a few are under a mask of
// long runs, is copied by TMA like any other; the rows of the rest are gathered by three warps of
// the producer with cp.async, 16 bytes a thread, and scattered by the consumers.
#pragma once

#include "gemm/row_groups.cuh"
#include "gemm/wgmma_gemm.cuh"
#include "gemm/wgmma_row_store.cuh"

namespace fftune {

// The operands: maps as in the plain engine, and the addresses of what is gathered and scattered.
template <class T, class Outputs>
struct grouped_operands {
  const tensor_map& a;
  const tensor_map& a1;  // of the second term
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
          class Operands = forward_operands>
class wgmma_grouped_gemm : wgmma_gemm<T, Epilogue, tile, T, no_scales, Operands> {
  using engine = wgmma_gemm<T, Epilogue, tile, T, no_scales, Operands>;
  using typename engine::loader;
  using typename engine::ring;
  using typename engine::schedule;
  using store = wgmma_row_store_of<T, Epilogue, tile>;
  using tiles = grouped_tiles<tile.bm, tile.cluster_m>;

 public:
  using typename engine::layout;
  using operands = grouped_operands<T, typename store::base::outputs>;

 private:
  static_assert(sorted_a || tile.cluster_n == 1, "gathered rows are not multicast");
  static_assert(!Operands::a_transposed && Operands::results == 1);
  static_assert(sorted_a || Operands::terms == 1);
  static constexpr int gatherers = 96;
  static constexpr int producer_barrier = 7;
  // Gathering takes more registers than the plain engine's producer has.
  static constexpr int producer_registers = sorted_a ? engine::producer_registers : 56;
  static constexpr int consumer_registers = sorted_a              ? engine::consumer_registers
                                            : tile.consumers == 3 ? 152
                                                                  : 224;

  // In shared memory after the engine's: what row_groups needs, the rows of the producer's tile and
  // of each consumer's, and the table of the tiles.
  static constexpr int groups_at = (layout::sums_barrier_at + 8 + 15) / 16 * 16;
  static constexpr int rows_at = groups_at + row_groups::shared_words * 4;
  static constexpr int tiles_at = rows_at + (tile.consumers + 1) * tile.bm * 4;

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

  // One thread: B of every tile. It announces the bytes of A too, unless they are gathered.
  static __device__ __forceinline__ void produce_b(const operands& from, const tiles& rows,
                                                   const wgmma_gemm_shape& shape, ring pipe,
                                                   u32 rank) {
    const k_range range = engine::range_of(shape, rank);
    for (schedule work(shape); work.pending(); work.advance(1)) {
      const tile_position at = work.position(rank);
      const grouped_rows own = rows.at(at.m);
      const loader source({from.a, own.group == 0 ? from.true_b0 : from.false_b0,
                           own.group == 0 ? from.true_b1 : from.false_b1, nullptr},
                          shape.k, rank);
      const u32 bytes =
          sorted_a || own.consecutive ? layout::stage_bytes : layout::stage_bytes - layout::a_bytes;
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

  // One thread: the A of a tile whose rows are neighbours, from `row` on.
  static __device__ __forceinline__ void copy_rows(const operands& from, const k_range& range,
                                                   ring& pipe, const loader& source, u32 rank,
                                                   int row) {
    const u32 share = tile.split_k > 1 ? 0 : rank % tile.cluster_n;
    const u16 row_blocks = static_cast<u16>(((1 << tile.cluster_n) - 1) << (rank - share));
    for (int tile_k = range.first; tile_k < range.last; ++tile_k, pipe.advance()) {
      barrier_wait(pipe.empty_barrier(), pipe.parity ^ 1);
      if constexpr (!sorted_a) barrier_arrive(pipe.full_barrier(), gatherers);  // in their place
      loader::template load<tile.cluster_n>(
          pipe.slot() + share * loader::a_share * layout::row_bytes,
          source.of_second_term(tile_k) ? from.a1 : from.a, pipe.full_barrier(),
          source.k_of(tile_k), row + share * loader::a_share, row_blocks, l2_policy::evict_normal);
    }
  }

  // All gatherers: the A of a tile whose rows are no neighbours.
  static __device__ __forceinline__ void gather_rows(const operands& from, const k_range& range,
                                                     ring& pipe, int k, const tiles& rows,
                                                     const grouped_rows& own, u32* tile_rows) {
    constexpr int step = gatherers / 8, passes = ceil_div(tile.bm, step);
    const int thread = threadIdx.x % 128 - 32, chunk = thread % 8, first = thread / 8;
    // Past this barrier no phase of the ring is older than this tile, so that parities tell.
    named_barrier_sync(producer_barrier, gatherers);
    for (int row = thread; row < tile.bm; row += gatherers) {
      // What is no row of the tile takes part as its last one, which nobody stores twice.
      tile_rows[row] = rows.groups.row_of(own.group, own.rank + smaller(row, own.count - 1));
    }
    named_barrier_sync(producer_barrier, gatherers);
    // A thread's rows wait in registers, so that its copies do not wait for each other.
    constexpr int kept = smaller(passes, 11);
    u32 kept_rows[kept];
#pragma unroll
    for (int i = 0; i < kept; ++i) {
      if ((i + 1) * step <= tile.bm || first + i * step < tile.bm) {
        kept_rows[i] = tile_rows[first + i * step];
      }
    }
    const u32 pitch = static_cast<u32>(k) * sizeof(T);
    for (int tile_k = range.first; tile_k < range.last; ++tile_k, pipe.advance()) {
      barrier_wait(pipe.empty_barrier(), pipe.parity ^ 1);
      const int column = tile_k * engine::bk + chunk * 8;
      const bool valid = column < k;  // zeros for the rest
      const char* const from_column =
          reinterpret_cast<const char*>(from.a_rows + (valid ? column : 0));
      // The swizzle of every other pass differs in one bit: a pass is 8 n + 4 rows.
      static_assert(step % 8 == 4);
      const u32 even = pipe.slot() + first * layout::row_bytes + ((chunk ^ (first & 7)) << 4);
#pragma unroll
      for (int i = 0; i < passes; ++i) {
        if ((i + 1) * step <= tile.bm || first + i * step < tile.bm) {
          u32 row = i < kept ? kept_rows[i < kept ? i : 0] : tile_rows[first + i * step];
          asm volatile("" : "+r"(row));  // else whole addresses are kept, twice as many registers
          copy_async((i % 2 == 0 ? even : even ^ 64) + i * step * layout::row_bytes,
                     from_column + static_cast<u64>(row) * pitch, valid);
        }
      }
      barrier_arrive_copied(pipe.full_barrier());
    }
  }

  // The gatherers, the first of which is the thread that TMA takes.
  static __device__ __forceinline__ void produce_a(const operands& from, const tiles& rows,
                                                   const wgmma_gemm_shape& shape, ring pipe,
                                                   u32 rank, u32* tile_rows) {
    const k_range range = engine::range_of(shape, rank);
    const bool first = threadIdx.x % 128 == 32;
    const loader source({from.a, from.a, from.a, nullptr}, shape.k, rank);
    wait_for_dependencies();
    for (schedule work(shape); work.pending(); work.advance(1)) {
      const grouped_rows own = rows.at(work.position(rank).m);
      if (!sorted_a && !own.consecutive) {
        __syncwarp();  // the thread of TMA and the rest of its warp
        gather_rows(from, range, pipe, shape.k, rows, own, tile_rows);
      } else if (first) {
        copy_rows(from, range, pipe, source, rank, sorted_a ? own.first : own.row);
      } else {
        pipe.skip(range.last - range.first);
      }
    }
  }

  // Looks up where rows [skipped, skipped + box_tokens) of a tile go, if they are no neighbours.
  // All threads of the consumer.
  static __device__ __forceinline__ void find_targets(const tiles& rows, const grouped_rows& own,
                                                      int skipped, u32* tile_rows, int barrier_id) {
    if (sorted_c || own.consecutive) return;
    named_barrier_sync(barrier_id, 128);  // the tile before this one is stored
    const int count = smaller(own.count - skipped, layout::box_tokens);
    for (int row = threadIdx.x % 128; row < count; row += 128) {
      tile_rows[row] = rows.groups.row_of(own.group, own.rank + skipped + row);
    }
  }

  // After the main loop: until then every register is needed.
  static __device__ __forceinline__ wgmma_target_rows target(const tiles& rows,
                                                             const grouped_rows& own, int skipped,
                                                             u32* tile_rows) {
    const int count = own.count - skipped;
    if (!sorted_c && !own.consecutive) return {tile_rows, 0, count, false};
    const int first = sorted_c ? own.first : own.row;
    const bool last = first + own.count == rows.groups.rows();  // what follows is no row of C
    return {nullptr, first + skipped, count, count > 0 && (count >= layout::box_tokens || last)};
  }

  static __device__ __forceinline__ void consume(const operands& from, const tiles& rows,
                                                 const wgmma_gemm_shape& shape, ring pipe, u32 base,
                                                 u32 rank, int consumer, u32* tile_rows) {
    const k_range range = engine::range_of(shape, rank);
    const int k_tiles = range.last - range.first;
    const int first_row = tile.ping_pong ? 0 : consumer * layout::consumer_rows;
    typename store::base::boxes boxes{
        base + layout::output_at + consumer * layout::consumer_output_bytes,
        base + layout::output_barriers_at + consumer * tile.output_boxes * 8};
    schedule work(shape);
    if constexpr (tile.ping_pong) {
      if (consumer == 1) {
        work.advance(1);
        pipe.skip(k_tiles);
        named_barrier_arrive(4, 256);  // the first consumer multiplies first
      }
    }
    constexpr u32 turn = tile.ping_pong ? 2 : 1;
    alignas(16) typename engine::sums sum;
    for (; work.pending(); work.advance(turn)) {
      const tile_position at = work.position(rank);
      // What this consumer stores: a share of the tile's rows or, swapped, of its features; of a
      // split a share of the columns.
      const int share = tile.split_k > 1 ? static_cast<int>(rank) * layout::owned_columns : 0;
      const int skipped = tile.swapped ? share : first_row;
      bool gathered = false;
      {
        const grouped_rows own = rows.at(at.m);
        gathered = !sorted_a && !own.consecutive;
        find_targets(rows, own, skipped, tile_rows, 1 + consumer);
      }
      if constexpr (tile.ping_pong) named_barrier_sync(4 + consumer, 256);
      const auto fetch = [&] {
        if constexpr (store::base::fetches) {
          const grouped_rows own = rows.at(at.m);
          store::base::fetch_residual(boxes, from.c, own.first + skipped,
                                      static_cast<int>(at.n) * tile.bn);
        }
      };
      engine::main_loop(sum, pipe, k_tiles, first_row, rank,
                        smaller(store::base::fetch_after, k_tiles) - 1, fetch, gathered);
      if constexpr (tile.ping_pong) {
        named_barrier_arrive(4 + (consumer ^ 1), 256);
        pipe.skip(k_tiles);
      }
      const int feature = static_cast<int>(at.n) * tile.bn + (tile.swapped ? first_row : share);
      const auto to = [&] { return target(rows, rows.at(at.m), skipped, tile_rows); };
      if constexpr (tile.split_k > 1) {
        typename store::base::owned_sums total;
        store::base::exchange_sums(sum, total, base + layout::exchange_at,
                                   base + layout::sums_barrier_at, rank);
        if (rank >= layout::owners) return;
        store::store(total, boxes, from.c, from.c_rows, to(), feature, shape.n, 1 + consumer);
      } else {
        store::store(sum, boxes, from.c, from.c_rows, to(), feature, shape.n, 1 + consumer);
      }
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
  }

 public:
  // `shape.m` counts all rows. After the layout's bytes, shared memory has 8 more to align, those
  // of the tables above, and those of grouped_tiles.
  static __device__ __forceinline__ void run(const operands& from, const wgmma_gemm_shape& shape,
                                             unsigned char* memory) {
    const u32 start = shared_address(memory);
    const u32 base = (start + 1023) & ~1023u;  // swizzle atoms are 1024 bytes
    unsigned char* const aligned = memory + (base - start);
    ring pipe{base, base + layout::barriers_at, base + layout::barriers_at + tile.stages * 8};
    const u32 rank = layout::cluster_blocks == 1 ? 0 : cluster_rank();
    const int group = threadIdx.x / 128;
    if (threadIdx.x == tile.consumers * 128 + 64) prefetch_maps(from);
    if (threadIdx.x == 0) {
      engine::init_barriers(pipe, base, rank, sorted_a ? 1 : 1 + gatherers);
    }
    __syncthreads();
    if constexpr (layout::cluster_blocks > 1) cluster_arrive();
    // The mask is older than the kernel before this one, so it is read without a wait.
    const row_groups groups = row_groups::build<layout::threads>(
        from.mask, shape.m, reinterpret_cast<u32*>(aligned + groups_at));
    const tiles rows(groups, reinterpret_cast<u32*>(aligned + tiles_at), layout::threads);
    // A split's blocks need each other only for the sums: they wait there.
    if constexpr (layout::cluster_blocks > 1 && tile.split_k == 1) cluster_wait();
    launch_dependents();
    const wgmma_gemm_shape tiled{static_cast<int>(rows.count()) * tile.bm, shape.n, shape.k,
                                 shape.group_m};
    u32* const tile_rows = reinterpret_cast<u32*>(aligned + rows_at) + group * tile.bm;
    if (group == tile.consumers) {
      if constexpr (!layout::light)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(producer_registers));
      const int thread = threadIdx.x % 128;
      if (thread == 0) produce_b(from, rows, tiled, pipe, rank);
      if (thread == 32 || (!sorted_a && thread > 32)) {
        produce_a(from, rows, tiled, pipe, rank, tile_rows);
      }
      if constexpr (tile.split_k > 1) {
        __syncwarp();
        cluster_wait();
      }
    } else {
      if constexpr (!layout::light)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(consumer_registers));
      consume(from, rows, tiled, pipe, base, rank, group, tile_rows);
    }
  }
};

}  // namespace fftune
