// The sm_90a GEMM: C = epilogue(A·Bᵀ) with TMA and wgmma, dense, of grouped rows, and as a grouped
// reduction: one persistent, warp-specialised kernel for every form (gemm/form.cuh).
//
//   producer warps              shared memory          MMA warpgroups (1 to 3)
//  +-------------------------+  +-------------------+  +------------------------------+
//  | warp 0  TMA: B          |  | stages: A|B0(|B1) |  | mainloop.cuh: wgmma          |
//  | warp 1  TMA: A          |->| of one K block,   |->| into accumulators            |
//  |  or 1-2 gather A's rows |  | rows of 128 bytes |  |              |               |
//  |  or 0-3 gather tokens   |  +-------------------+  |              v               |
//  |         (load.cuh)      |  | split-K reduction |<-> split_k.cuh: DSMEM, cluster  |
//  |                         |  +-------------------+  |              |               |
//  | next    index warp:     |  | epilogue stages:  |  |              v               |
//  |         rows of tiles   |  | subtiles of C     |<-> epilogue.cuh: visitors, then |
//  |         ahead           |  +-------------------+  | TMA stores, or rows          |
//  |         (pipeline.cuh)  |->| barriers; groups, |->| scattered                    |
//  +-------------------------+  | row indices       |  +------------------------------+
//                               +-------------------+  offsets: config.cuh
//
//  barrier              arrivals that complete a phase          who waits
//  full[stage]          B's TMA thread with the bytes of both   MMA warpgroups
//                       operands; gathered A: 64 threads more
//                       (their cp.async); scales of K blocks:
//                       those 64, or the warp of A, which
//                       copy them; gathered K blocks: all
//                       threads of the gather warps
//  empty[stage]         a thread of each MMA warpgroup of each  producers
//                       CTA that loads into the stage; with
//                       scales of K blocks of each MMA warp
//  epilogue[w][stage]   the bytes of source, or gate and up     MMA warpgroup w (all, if shared)
//  reduction            the bytes of the other CTAs'            MMA warpgroups of a reducer
//                       accumulators
//  row indices          full: the index warp; empty: the MMA    gather warps and MMA warpgroups;
//  [2 stages]           warps (grouped rows), or the gather     the index warp
//                       warps (grouped reduction)
//  replay[2]            the storing thread (A reuse)            the gather warps' TMA thread
//  named barriers       pipeline.cuh
//
// Every role walks the same tile scheduler (tile_scheduler.cuh) to the same work tiles.
// Cooperative: the MMA warpgroups split each tile. Ping-pong: two alternate tiles, so that
// one's MMAs overlap the other's epilogue. In a cluster of cluster_m x cluster_n CTAs those of one
// tile row each load a share of its A and multicast it to the others, and those of one tile column
// its B: less traffic from L2. Or, where tiles are too few to fill the device, the CTAs of a
// cluster share the k of one tile.
//
// Grouped rows. Each work tile has rows of one group, so that no row is computed twice. A, or C,
// may be in the sorted order, where a tile's rows are consecutive. Else a tile whose rows happen to
// be consecutive, as all but a few are under a mask of long runs, is loaded by TMA like any other;
// the rows of the rest are gathered, and scattered by the epilogue. With A reuse the first of
// several tiles of the same rows alone is gathered.
//
// Grouped reduction. C_g = A_gᵀ·B_g sums over the tokens of each group g (weight gradients). A K
// block is 64 tokens of one group: TMA loads it where they are consecutive or sorted, else warps
// gather them. Rows past the end of a group in its last K block are overwritten with zeros by the
// MMA warpgroups. Tokens are accumulated in their order, whatever the groups; a group without
// tokens has a C of zeros.
//
// B is a weight, which no kernel before this one writes: its first K blocks are loaded without a
// wait for those (programmatic dependent launch), unless the form says that it depends on them.
#include "common/async.cuh"
#include "gemm/group_terms.cuh"
#include "gemm/sm90/load.cuh"
#include "gemm/sm90/mainloop.cuh"
#include "gemm/sm90/qkv_epilogue.cuh"
#include "gemm/sm90/split_k.cuh"

namespace fftune {

template <class Traits>
struct gemm_kernel {
  static constexpr gemm_form form = Traits::form;
  static constexpr sm90_config config = Traits::config;
  static constexpr sm90_plan plan = Traits::plan;
  static constexpr bool dense = form.groups == grouping::none;
  static constexpr bool grouped_rows = form.groups == grouping::rows;
  static constexpr bool reduction = form.groups == grouping::reduction;
  static constexpr bool routed = !dense && form.source == group_source::routed;
  static constexpr bool splits_k = config.split_k > 1;
  // Rows that may have to be gathered: of A, in a grouped reduction of either operand.
  static constexpr bool gathers =
      grouped_rows ? !form.a_sorted : reduction && !(form.a_sorted && form.b_sorted);
  // Whether the index warp has to look for rows: for loads, or for stores to C in the tokens'
  // order.
  static constexpr bool finds_rows = gathers || (grouped_rows && !form.c_sorted);
  // The next launch may take for settled what this one has waited for. So where this one begins
  // before the groups are sorted, its index warp lets the next one start, when they are.
  static constexpr bool counts = routed && form.ready == groups_ready::counted;
  static_assert(!counts || finds_rows);
  static constexpr bool reuses_a = config.a_reuse > 1;
  static constexpr bool promotes = form.scales != scaling::none;
  static constexpr bool scaled = form.scales_k_blocks();
  static constexpr bool looks_up_in_warps = scaled && grouped_rows;
  static constexpr int mma_threads = config.mma_warpgroups * 128;
  static_assert(dense || sm90_registers_fit(plan, config));
  static_assert(dense || !promotes || (grouped_rows && routed && form.c_sorted && !reuses_a));
  static_assert(!grouped_rows || (form.a_major == major::k && form.outputs() == 1));
  static_assert(!grouped_rows || form.a_sorted || (config.cluster_n == 1 && form.k_pairs() == 1));
  static_assert(!reuses_a || (gathers && !form.is_gradient()));
  static_assert(!reduction || (form.a_major == major::mn && form.b_major == major::mn));
  static_assert(form.outputs() == 1 || dense || form.a_sorted);

  using T = element_type<form.ab>;
  using groups_type = typename Traits::groups;
  using group_tiles = typename Traits::group_tiles;
  static_assert(groups_type::shared_words == (routed ? sm90_offsets_words : sm90_mask_words) ||
                dense);
  using stages = pipeline<config.stages, plan.stage_bytes>;
  using loader = tma_loader<Traits>;
  using mma = mma_mainloop<Traits>;
  using accumulators = typename mma::accumulators;
  using epilogue = epilogue_of<Traits>;
  using row_indices =
      typename choose_type<reduction,
                           row_index_pipeline<sm90_reduction_tokens, sm90_reduction_lookahead>,
                           row_index_pipeline<config.bm>>::type;

  // Domain of a tile scheduler.
  struct no_groups {};
  using walked = typename choose_type<
      dense, no_groups, typename choose_type<grouped_rows, group_tiles, groups_type>::type>::type;
  using scheduler =
      typename choose_type<dense, dense_scheduler<Traits>,
                           typename choose_type<reduction, reduction_scheduler<Traits>,
                                                rows_scheduler<Traits>>::type>::type;

  // State that every role has.
  const sm90_params& params;  // Holds the tensor maps.
  const gemm_params gemm;     // A copy, which the compiler may read again or keep, as it likes.
  u32 base;                   // Shared memory.
  u32 rank;                   // Rank in the cluster.

  __device__ __forceinline__ scheduler schedule(const walked& groups) const {
    if constexpr (dense) {
      return scheduler(gemm, rank);
    } else {
      return scheduler(gemm, groups, rank);
    }
  }

  // --- Producer warps ---

  // A group's weights come from memory, and few CTAs share them: a load of them takes longer than
  // the MMAs of the stages before it. So the first cluster of a group asks for K blocks in L2
  // before a stage is free. A CTA by itself would run ahead of those that share its B.
  static constexpr bool prefetches_b =
      grouped_rows && routed && !promotes && config.bm > 64 && config.cluster_m > 1;
  static constexpr int prefetched_k_blocks = 4;

  // One thread: B of every tile, or a warp's first where the lookup takes one. It announces the
  // bytes of A too, if these are TMA's in any case, which A's thread may well have begun to load.
  __device__ __forceinline__ void load_b(const walked& groups, stages pipe, int lane) const {
    constexpr u32 bytes = gathers ? plan.stage_bytes - plan.a_bytes : plan.stage_bytes;
    const loader load(params, gemm, rank);
    if constexpr (form.b_depends) wait_for_dependencies();
    scheduler work = schedule(groups);
    const auto next = [&](const scheduler& then) {
      if constexpr (prefetches_b) {
        work.go(then.here());
      } else {
        work.next(1);
      }
    };
    for (scheduler then = work; work.is_valid(); next(then)) {
      const work_tile tile = work.tile();
      const int group = work.group(tile);
      for (int k_block = tile.k.first; k_block < tile.k.last; ++k_block, pipe.advance()) {
        pipe.wait_empty();
        if (looks_up_in_warps && lane != 0) continue;
        barrier_arrive_expect(pipe.full_barrier(), bytes);
        load.load_b(pipe.buffer(), pipe.full_barrier(), k_block, tile.n * config.bn, group);
        if constexpr (prefetches_b) {
          if (k_block == tile.k.first) then.next(1);
          const int later = k_block + prefetched_k_blocks;
          if (later < tile.k.last) {
            if (work.is_first_of_group()) load.prefetch_b(later, tile.n * config.bn, group);
          } else if (then.is_valid() && then.is_first_of_group()) {
            const work_tile own = then.tile();
            load.prefetch_b(own.k.first + later - tile.k.last, own.n * config.bn, then.group(own));
          }
        }
      }
    }
    if constexpr (plan.cluster_ctas > 1 && !splits_k) pipe.drain();
  }

  // One thread: A of every tile. Or a warp, whose lanes copy the scales.
  __device__ __forceinline__ void load_a(const walked& groups, stages pipe, int lane) const {
    const loader load(params, gemm, rank);
    wait_for_dependencies();
    for (scheduler work = schedule(groups); work.is_valid(); work.next(1)) {
      const work_tile tile = work.tile();
      if constexpr (scaled) {
        const group_tile own = rows_of(work, tile);
        const scale_loader<Traits, 32> scales(gemm, static_cast<int>(tile.n) * config.bn, own.group,
                                              lane, [&](int i) { return scaled_row(own, i); });
        for (int k_block = tile.k.first; k_block < tile.k.last; ++k_block, pipe.advance()) {
          pipe.wait_empty();
          if (lane == 0) {
            load.load_a(pipe.buffer(), pipe.full_barrier(), k_block, own.first, tile.output);
          }
          scales.copy(scales_of(pipe), k_block);
          barrier_arrive_copied(pipe.full_barrier());
        }
      } else {
        const int row = work.first_row(tile);
        for (int k_block = tile.k.first; k_block < tile.k.last; ++k_block, pipe.advance()) {
          pipe.wait_empty();
          load.load_a(pipe.buffer(), pipe.full_barrier(), k_block, row, tile.output);
        }
      }
    }
  }

  // The scales in the next stage.
  __device__ __forceinline__ u32 scales_of(const stages& pipe) const {
    return base + plan.scales_at + pipe.index * plan.scale_bytes;
  }
  // The rows of a tile; dense: from its first row on all that there are.
  __device__ __forceinline__ group_tile rows_of(const scheduler& work,
                                                const work_tile& tile) const {
    if constexpr (grouped_rows) {
      return work.rows(tile);
    } else {
      return {0, 0, tile.row, gemm.m - tile.row};
    }
  }
  // The row whose scales apply to row i. Padding uses those of the last row.
  __device__ __forceinline__ int scaled_row(const group_tile& own, int i) const {
    const int rank = larger(smaller(i, own.count - 1), 0);
    const int sorted = smaller(own.first + rank, gemm.m - 1);
    if constexpr (grouped_rows && !form.a_scales_sorted) return gemm.permutation[sorted];
    return sorted;
  }

  // The gather warps of grouped rows: A of every tile, which the first of their threads has TMA
  // load where rows are consecutive. Both warps fill every stage, so that neither is a phase
  // behind.
  __device__ __forceinline__ void gather_a(const walked& groups, stages pipe, row_indices indices,
                                           int thread) const {
    const replay_barriers replay{base + plan.reuse_barriers_at};
    bool replays = false;
    u32 phase = 0;
    wait_for_dependencies();
    for (scheduler work = schedule(groups); work.is_valid(); work.next(1)) {
      const k_range k = work.tile().k;
      const tile_rows own = indices.wait();
      const bool consecutive = own.consecutive();
      if constexpr (scaled) {
        gather_scaled(work, own, pipe, thread);
      } else if (!consecutive && work.first()) {
        const row_gather<config.bm, row_gather_threads> gather(own.rows, thread);
        for (int k_block = k.first; k_block < k.last; ++k_block, pipe.advance()) {
          pipe.wait_empty();
          gather.template copy<1>(static_cast<const T*>(gemm.a[0]), gemm.k, k_block * plan.bk,
                                  pipe.buffer());
          barrier_arrive_copied(pipe.full_barrier());
        }
      } else if (thread % 32 == 0) {
        const tensor_map& a = consecutive || !reuses_a ? params.a[0] : params.reuse;
        const int row = consecutive ? own.first() : static_cast<int>(work.tile().m) * config.bm;
        for (int k_block = k.first; k_block < k.last; ++k_block, pipe.advance()) {
          pipe.wait_empty();
          barrier_arrive(pipe.full_barrier(), thread == 0 ? 31 : 32);  // in place of its warp
          if (thread == 0) {
            if (replays) replay.wait(k_block, k.last, phase);
            barrier_arrive_expect(pipe.full_barrier(), plan.a_bytes);
            tma_load(pipe.buffer(), a, pipe.full_barrier(), k_block * plan.bk, row,
                     l2_policy::evict_normal);
          }
        }
      } else {
        pipe.advance(k.count());
      }
      __syncwarp();
      if (replays) phase ^= 1;
      replays = !consecutive && work.first() && !work.last();
      if (work.last()) indices.advance();
    }
  }

  // The same of one tile with the scales of its rows, whose places are those of the rows.
  __device__ __forceinline__ void gather_scaled(const scheduler& work, const tile_rows& own,
                                                stages& pipe, int thread) const {
    const work_tile tile = work.tile();
    const group_tile rows = rows_of(work, tile);
    const bool consecutive = own.consecutive();
    const row_gather<config.bm, row_gather_threads> gather(own.rows, thread);
    const scale_loader<Traits, row_gather_threads> scales(
        gemm, static_cast<int>(tile.n) * config.bn, rows.group, thread,
        [&](int i) { return rows.count > 0 ? static_cast<int>(own.rows[i]) : 0; });
    for (int k_block = tile.k.first; k_block < tile.k.last; ++k_block, pipe.advance()) {
      pipe.wait_empty();
      if (!consecutive) {
        gather.template copy<1>(static_cast<const T*>(gemm.a[0]), gemm.k, k_block * plan.bk,
                                pipe.buffer());
      } else if (thread == 0) {
        barrier_expect(pipe.full_barrier(), plan.a_bytes);
        tma_load(pipe.buffer(), params.a[0], pipe.full_barrier(), k_block * plan.bk, own.first(),
                 l2_policy::evict_normal);
      }
      scales.copy(scales_of(pipe), k_block);
      barrier_arrive_copied(pipe.full_barrier());
    }
  }

  // The tokens from a K block of a group on, `most` of them; there are none past the group's last.
  static __device__ __forceinline__ group_tile tokens_of(const groups_type& groups, int group,
                                                         int k_block, int most) {
    const int rank = k_block * plan.bk, left = groups.count(group) - rank;
    return {group, rank, groups.first(group) + rank, smaller(left, most)};
  }

  // The gather warps of a grouped reduction: both operands of every K block. If TMA loads an
  // operand, the first thread of one warp issues A and that of another B, and each announces its
  // bytes.
  __device__ __forceinline__ void gather_tokens(const groups_type& groups, stages pipe,
                                                row_indices indices, int thread) const {
    const bool has_a = thread == 0, has_b = thread == 32;
    const loader load(params, gemm, rank);
    for (scheduler work = schedule(groups); work.is_valid(); work.next(1)) {
      const work_tile tile = work.tile();
      const tensor_map& a = form.outputs() == 2 && tile.output == 1 ? params.a[1] : params.a[0];
      const int row = tile.m * config.bm, column = tile.n * config.bn;
      for (int k_block = tile.k.first; k_block < tile.k.last; ++k_block, pipe.advance()) {
        const int sorted = tokens_of(groups, tile.group, k_block, plan.bk).first;
        const int in_stage = (k_block - tile.k.first) % sm90_reduction_lookahead;
        const tile_rows tokens = gathers ? indices.wait(in_stage) : indices.unread();
        const row_gather<sm90_reduction_tokens, config.gather_warps * 32> gather(tokens.rows,
                                                                                 thread);
        if (gathers && (in_stage == sm90_reduction_lookahead - 1 || k_block == tile.k.last - 1)) {
          indices.release();
          indices.advance();
        }
        const bool consecutive = !gathers || tokens.consecutive();
        pipe.wait_empty();
        if (has_a && (form.a_sorted || consecutive)) {
          barrier_expect(pipe.full_barrier(), plan.a_bytes);
          loader::template load_share<config.cluster_n, major::mn, loader::a_share>(
              pipe.buffer() + load.j * loader::a_share * loader::row_bytes, a, pipe.full_barrier(),
              form.a_sorted ? sorted : tokens.first(), row + load.j * loader::a_share,
              load.row_ctas, l2_policy::evict_normal);
        }
        if (has_b && (form.b_sorted || consecutive)) {
          barrier_expect(pipe.full_barrier(), plan.b_bytes);
          loader::template load_share<config.cluster_m, major::mn, loader::b_share>(
              pipe.buffer() + plan.a_bytes + load.i * loader::b_share * loader::row_bytes,
              params.b[0][0], pipe.full_barrier(), form.b_sorted ? sorted : tokens.first(),
              column + load.i * loader::b_share, load.column_ctas, l2_policy::evict_normal);
        }
        __syncwarp();
        if (consecutive) {
          if (thread % 32 == 0) barrier_arrive(pipe.full_barrier(), 32);  // in place of its warp
          continue;
        }
        if constexpr (!form.a_sorted) {
          gather.template copy<config.bm / 64>(static_cast<const T*>(gemm.a[0]), gemm.m, row,
                                               pipe.buffer());
        }
        if constexpr (!form.b_sorted) {
          gather.template copy<config.bn / 64>(static_cast<const T*>(gemm.b[0][0]), gemm.n, column,
                                               pipe.buffer() + plan.a_bytes);
        }
        barrier_arrive_copied(pipe.full_barrier());
      }
    }
    if constexpr (plan.cluster_ctas > 1 && !splits_k) pipe.drain();
  }

  // The index warp: which rows, or tokens, the tiles have.
  __device__ __forceinline__ void find_rows(const walked& groups, row_indices indices) const {
    if constexpr (grouped_rows) {
      for (scheduler work = schedule(groups); work.is_valid(); work.next_rows()) {
        indices.fill(groups.groups(), work.rows(work.tile()));
      }
    } else {
      for (scheduler work = schedule(groups); work.is_valid(); work.next(1)) {
        const work_tile tile = work.tile();
        for (int k_block = tile.k.first; k_block < tile.k.last;
             k_block += sm90_reduction_lookahead) {
          indices.fill(groups, tokens_of(groups, tile.group, k_block, row_indices::rows));
        }
      }
    }
  }

  // --- MMA warpgroups ---

  // Work on stages besides their MMAs.
  template <class Prefetch, class LookAhead>
  struct hooks {
    bool generic_writes;  // cp.async filled the stages, which wgmma does not see without a fence
    replay_store replay;  // with A reuse
    int tokens;           // grouped reduction: from the first K block to the end of the group
    int warpgroup;
    int prefetch_at;  // the K block after whose MMAs the source is asked for
    const Prefetch& prefetch;
    const LookAhead& look_ahead;

    __device__ __forceinline__ void on_full(u32 buffer, int k_block) const {
      if constexpr (reduction) {
        const int count = larger(tokens - k_block * plan.bk, 0);
        if (count < plan.bk) zero_fill(buffer, count);
        if (gathers) async_proxy_fence();
      } else if constexpr (gathers) {
        if (generic_writes) async_proxy_fence();
        if constexpr (reuses_a) replay.store(buffer, k_block * plan.bk);
      }
    }
    __device__ __forceinline__ void on_issued(int k_block) const {
      if constexpr (form.is_gradient()) {
        if (k_block == prefetch_at) prefetch();
      }
    }
    __device__ __forceinline__ void on_all_issued() const { look_ahead(); }
    template <int pending>
    __device__ __forceinline__ void on_read() const {
      if constexpr (reuses_a) replay.template wait_read<pending>();
    }

    // Overwrites with zeros what a stage has from token `count` on: in each slab of 64 elements of
    // either operand a token is a row of 128 bytes. All MMA warpgroups of the tile.
    __device__ __forceinline__ void zero_fill(u32 buffer, int count) const {
      constexpr int threads = (config.pingpong() ? 1 : config.mma_warpgroups) * 128;
      constexpr int slabs = plan.stage_bytes / wgmma_slab_bytes;
      const int thread = config.pingpong() ? threadIdx.x % 128 : threadIdx.x;
      const int vectors = (64 - count) * (128 / 16);  // of a slab
      for (int i = thread; i < slabs * vectors; i += threads) {
        const int slab = i / vectors;
        store_shared(buffer + slab * wgmma_slab_bytes + count * 128 + (i - slab * vectors) * 16,
                     make_float4(0, 0, 0, 0));
      }
      async_proxy_fence();
      sync(named_barrier::zero_fill, threads, config.pingpong() ? warpgroup : 0);
    }
  };

  static constexpr bool prefetches_next = [] {
    if constexpr (form.is_gradient()) return epilogue::prefetches_next;
    return false;
  }();

  __device__ __forceinline__ auto main_loop(const scheduler& work, const work_tile& tile,
                                            int first_row) const {
    if constexpr (promotes && grouped_rows) {
      group_tile own = {};
      if constexpr (form.scales != scaling::block) own = rows_of(work, tile);
      const int column = static_cast<int>(tile.n) * config.bn + (config.swap_ab() ? first_row : 0);
      return promoting_mainloop<Traits>(first_row, rank, gemm, base + plan.scales_at,
                                        config.swap_ab() ? 0 : first_row, column, own);
    } else if constexpr (promotes) {
      const int row = tile.row + (config.swap_ab() ? 0 : first_row);
      const int column = static_cast<int>(tile.n) * config.bn + (config.swap_ab() ? first_row : 0);
      return promoting_mainloop<Traits>(first_row, rank, gemm, base + plan.scales_at, row, column,
                                        {0, 0, 0, gemm.m});
    } else {
      return mma{static_cast<u32>(first_row), rank};
    }
  }

  // Past the K blocks of the tile that is the other warpgroup's.
  static __device__ __forceinline__ void skip_tile(const scheduler& other, stages& pipe) {
    if constexpr (reduction) {
      if (other.is_valid()) pipe.advance(other.tile().k.count());
    } else {
      pipe.advance(other.tile().k.count());
    }
  }

  // Where this warpgroup's share of a tile goes; for a reducer, its share of the columns.
  __device__ __forceinline__ output_tile output_of(const scheduler& work, const work_tile& tile,
                                                   const row_indices& indices,
                                                   int first_row) const {
    int share = 0;  // of the columns of the MMAs
    if constexpr (splits_k && !reduction) share = static_cast<int>(rank) * plan.reduced_columns;
    const int m = config.swap_ab() ? share : first_row, n = config.swap_ab() ? first_row : share;
    const int column = static_cast<int>(tile.n) * config.bn + n;
    if constexpr (dense) {
      return {tile.row + m, column, 0, tile.output, nullptr, 0, true};
    } else if constexpr (reduction) {
      return {static_cast<int>(tile.m) * config.bm + m,
              column,
              tile.group,
              tile.output,
              nullptr,
              0,
              true};
    } else {
      const group_tile own = rows_of(work, tile);
      const int count = own.count - m;
      int first = own.first;
      if constexpr (!form.c_sorted) {
        const tile_rows rows = indices.wait();
        if (!rows.consecutive()) return {0, column, 0, 0, rows.rows + m, count, false};
        first = rows.first();
      }
      const bool last = first + own.count == gemm.m;  // what follows is no row of C
      return {
          first + m, column, 0, 0, nullptr, count, count > 0 && (count >= plan.subtile_m || last)};
    }
  }

  using terms = group_terms<form>;
  static_assert(!terms::present || (grouped_rows && form.c_sorted && !splits_k));
  // The factors of rows and the biases of groups, into the accumulators.
  __device__ __forceinline__ void apply_terms(accumulators& acc, const group_tile& own,
                                              const work_tile& tile, int first_row) const {
    constexpr int b_operands = form.b_operands(), m64_tiles = plan.m64_tiles;
    constexpr int eights = plan.accumulators / 4;  // of the columns of the MMAs
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int first_of_64 = first_row + warp * 16 + lane / 4, first_of_8 = lane % 4 * 2;
    const int column = static_cast<int>(tile.n) * config.bn;
    const auto factor = [&](int row) {
      return row < own.count ? terms::factor(gemm, own.first + row) : 0.0f;
    };
    // Terms of the side with 64 rows per m64 tile; a thread has two of them:
    float factors[m64_tiles][2], biases[m64_tiles][2][b_operands];
#pragma unroll
    for (int i = 0; i < 2 * m64_tiles; ++i) {
      const int at = first_of_64 + i / 2 * 64 + i % 2 * 8;
      if constexpr (config.swap_ab()) {
#pragma unroll
        for (int operand = 0; operand < b_operands; ++operand) {
          biases[i / 2][i % 2][operand] = terms::bias(gemm, own.group, operand, column + at);
        }
      } else {
        factors[i / 2][i % 2] = factor(at);
      }
    }
#pragma unroll
    for (int eight = 0; eight < eights; ++eight) {
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const int at = eight * 8 + first_of_8 + next;
        asm volatile("" ::: "memory");  // else all biases are loaded at once, into registers
        const float of_row = config.swap_ab() ? factor(at) : 0.0f;
#pragma unroll
        for (int operand = 0; operand < b_operands; ++operand) {
          const float of_column =
              config.swap_ab() ? 0.0f : terms::bias(gemm, own.group, operand, column + at);
#pragma unroll
          for (int i = 0; i < 2 * m64_tiles; ++i) {
            float& value = acc[i / 2][operand][eight * 4 + i % 2 * 2 + next];
            if constexpr (config.swap_ab()) {
              value = value * of_row + biases[i / 2][i % 2][operand];
            } else {
              value = value * factors[i / 2][i % 2] + of_column;
            }
          }
        }
      }
    }
  }

  // The work of an MMA warpgroup.
  __device__ __forceinline__ void compute(const walked& groups, stages pipe, row_indices indices,
                                          int warpgroup) const {
    const int first_row = config.pingpong() ? 0 : warpgroup * plan.warpgroup_rows;
    epilogue out(params, gemm, base, warpgroup);
    const replay_barriers replay{base + plan.reuse_barriers_at};
    scheduler work = schedule(groups);
    if constexpr (config.pingpong()) {
      if (warpgroup == 1) {
        skip_tile(work, pipe);
        work.next(1);
        if constexpr (grouped_rows) indices.advance();
        arrive(named_barrier::mma_order, 256);  // the first warpgroup has the tensor cores first
        if constexpr (prefetches_next) arrive(named_barrier::source_order, 256);  // and the stages
      }
    }
    constexpr u32 turn = config.pingpong() ? 2 : 1;
    alignas(16) accumulators acc;
    bool met = false;  // the other CTAs of a split
    bool last_of_rows = true;
    u32 ordinal = config.pingpong() ? warpgroup : 0;
    // Where the next tile lies among many groups takes hundreds of clocks to find, which the last
    // MMAs of the one before cover.
    constexpr bool looks_ahead = grouped_rows && routed && !promotes;
    auto ahead = [&] {
      if constexpr (looks_ahead) {
        return work.here();
      } else {
        return no_groups{};
      }
    }();
    const auto look_ahead = [&] {
      if constexpr (looks_ahead) ahead = work.after(turn);
    };
    const auto next = [&] {
      if constexpr (looks_ahead) {
        work.go(ahead);
      } else {
        work.next(turn);
      }
      ordinal += turn;
      if constexpr (finds_rows && grouped_rows) indices.advance(last_of_rows ? turn : 0);
    };
    for (; work.is_valid(); next()) {
      work_tile tile = work.tile();
      if (reduction && splits_k && tile.k.count() == 0) continue;
      bool gathered = false;
      if constexpr (grouped_rows) {
        last_of_rows = work.last();
        if constexpr (gathers) gathered = work.first() && !indices.wait().consecutive();
      }
      const auto tile_after = [&](u32 later, bool& is_valid) {
        scheduler then = work;
        then.next(later);
        is_valid = then.is_valid();
        return output_of(then, then.tile(), indices, first_row);
      };
      const auto prefetch_source = [&] {
        if constexpr (prefetches_next) {
          if (ordinal == 0) out.prefetch_first(tile_after);
        } else {
          out.prefetch_source(output_of(work, tile, indices, first_row));
        }
      };
      if constexpr (form.adds_source) {
        if (reduction ? rank == tile.reducer : !splits_k || rank < plan.reducers) prefetch_source();
      }
      if constexpr (config.pingpong()) sync(named_barrier::mma_order, 256, warpgroup);
      const auto loop = main_loop(work, tile, first_row);
      if constexpr (promotes) {
        loop.run(acc, pipe, tile.k, gathered);
      } else {
        int tokens = 0, prefetch_at = 0;
        if constexpr (reduction) tokens = groups.count(tile.group) - tile.k.first * plan.bk;
        if constexpr (form.is_gradient())
          prefetch_at = smaller(epilogue::load_at_k_block, tile.k.count()) - 1;
        const replay_store kept{params.reuse, static_cast<int>(tile.m) * config.bm,
                                reuses_a && gathered && !last_of_rows && threadIdx.x == 0};
        const hooks<decltype(prefetch_source), decltype(look_ahead)> others{
            gathered, kept, tokens, warpgroup, prefetch_at, prefetch_source, look_ahead};
        if constexpr (sm90_levels_tiles(form, config)) {
          loop.run_rows(acc, pipe, tile.k.count(), others, work.rows(tile).count);
        } else {
          loop.run(acc, pipe, tile.k.count(), others);
        }
        if constexpr (reuses_a) kept.template arrive<sm90_late_k_blocks>(replay.most);
      }
      if constexpr (config.pingpong()) {
        arrive(named_barrier::mma_order, 256, warpgroup ^ 1);
        scheduler other = work;
        other.next(1);
        skip_tile(other, pipe);
      }
      if constexpr (promotes) loop.scale(acc);
      if constexpr (terms::present) apply_terms(acc, work.rows(tile), tile, first_row);

      const u32 buffers = base + plan.reduction_at, arrived = base + plan.reduction_barrier_at;
      if constexpr (reduction) {
        tile = work.tile();  // once more: until here every register is needed
        if constexpr (splits_k) {
          if (!met) cluster_wait();  // the other CTAs have started, and their barriers are there
          met = true;
          const single_cta_reduction<Traits> across{buffers, arrived, rank};
          if (rank != tile.reducer) {
            across.send(acc, tile.reducer);
            continue;
          }
          across.receive(acc, tile.senders);
        }
      } else if constexpr (splits_k) {
        const split_k_reduction<Traits> across{buffers, arrived, rank};
        typename split_k_reduction<Traits>::fragment total;
        across.reduce(acc, total);
        if (rank >= plan.reducers) return;
        out.store(total, output_of(work, tile, indices, first_row));
      }
      if constexpr (prefetches_next) {
        out.store_and_prefetch(acc, ordinal, tile_after);
      } else if constexpr (reduction || !splits_k) {
        out.store(acc, output_of(work, tile, indices, first_row));
      }
      if constexpr (reuses_a) {
        const replay_store kept{params.reuse, 0, gathered && !last_of_rows && threadIdx.x == 0};
        kept.template arrive<plan.subtiles * form.stored_values()>(replay.all());
      }
      if constexpr (grouped_rows && finds_rows) {
        if (last_of_rows) indices.release();
      }
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
  }

  // --- All threads ---

  // One thread: all barriers of the CTA.
  __device__ __forceinline__ void init_barriers(const stages& pipe,
                                                const row_indices& indices) const {
    // Arrivals that fill a stage.
    constexpr u32 arrivals = reduction ? config.gather_warps * 32
                             : gathers ? 1 + row_gather_threads
                             : scaled  ? 1 + 32
                                       : 1;
    if constexpr (!dense) {
      indices.init(reduction           ? config.gather_warps
                   : config.pingpong() ? 4
                                       : 4 * config.mma_warpgroups);
    }
    if constexpr (reuses_a) replay_barriers{base + plan.reuse_barriers_at}.init();
    for (int stage = 0; stage < config.stages; ++stage) {
      barrier_init(pipe.full + stage * 8, arrivals);
      barrier_init(pipe.empty + stage * 8, mma::releases *
                                               (config.pingpong() ? 1 : config.mma_warpgroups) *
                                               (config.cluster_m + config.cluster_n - 1));
    }
    if constexpr (form.adds_source || form.is_gradient()) {
      for (int stage = 0; stage < plan.epilogue_barriers; ++stage) {
        barrier_init(base + plan.epilogue_barriers_at + stage * 8, 1);
      }
    }
    if constexpr (splits_k) {
      barrier_init(base + plan.reduction_barrier_at, 1);
      if (!reduction && rank < plan.reducers) {
        barrier_arrive_expect(base + plan.reduction_barrier_at, plan.reduction_bytes);
      }
    }
    barrier_init_fence();
  }

  // One thread.
  __device__ __forceinline__ void prefetch_maps() const {
    constexpr bool two_groups = grouped_rows && !form.stacked;
    tma_prefetch(params.b[0][0]);
    if constexpr (two_groups) tma_prefetch(params.b[1][0]);
    if constexpr (form.b_operands() * form.k_pairs() == 2 && form.b_packing == packing::separate) {
      tma_prefetch(params.b[0][1]);
      if constexpr (two_groups) tma_prefetch(params.b[1][1]);
    }
    if constexpr (form.is_qkv() && form.qkv.separate) {
      tma_prefetch(params.b[0][1]);
      tma_prefetch(params.b[1][0]);
    }
    tma_prefetch(params.a[0]);
    tma_prefetch(form.is_gradient() ? params.source[0] : params.out[0]);
    if constexpr (reduction && !form.stacked) {
      tma_prefetch(params.out[sm90_out_index(form, 0, 0, 1)]);
    }
  }

  // While the mask is being loaded: prefetches both groups' B for the expected first tile of this
  // CTA, and its expected rows, to L2. The mask decides which tile and group it is, but
  // some CTA needs all of this data, unless one group has no rows. One in four of the CTAs that
  // share it prefetches it. Dual GEMMs, and programmatic launches that wait for an earlier kernel,
  // do not gain from it. One thread of each of three warps, by number.
  static constexpr bool prefetches_operands =
      grouped_rows && gathers && form.b_operands() == 1 && !routed && !form.stacked;
  __device__ __forceinline__ void prefetch_operands(int warp) const {
    const tile_raster<Traits> raster(gemm.m + config.bm, rows_scheduler<Traits>::raster_n(gemm.n),
                                     gemm.group_m);
    tile_position at = raster.position(rank);
    if constexpr (reuses_a) at.n *= config.a_reuse;
    const bool rows = warp == 1;
    if (!raster.is_valid() || (rows ? at.n : at.m / config.cluster_m) % 4 != 0) return;
    const k_range range = k_range_of<Traits>(gemm.k, rank);
    const int last = smaller(range.last, range.first + config.stages);
    const u32 share = splits_k ? 0 : rank;
    const int row = at.m * config.bm, column = at.n * config.bn + share * loader::b_share;
    const tensor_map& b = warp == 2 ? params.b[0][0] : params.b[1][0];
    for (int k_block = range.first; k_block < last; ++k_block) {
      const int k = k_block * plan.bk;
      if (rows) {
        tma_prefetch(params.a[0], k, row);
      } else if constexpr (form.b_major == major::mn) {
#pragma unroll
        for (int slab = 0; slab < loader::b_share; slab += 64) tma_prefetch(b, column + slab, k);
      } else {
        tma_prefetch(b, k, column);
      }
    }
  }

  // The groups, once the block has them; all threads. A mask is older than the kernel before this
  // one, so it is read without a wait; routed groups may be written by that kernel (groups_ready).
  __device__ __forceinline__ groups_type build_groups(unsigned char* memory) const {
    if constexpr (routed && form.ready == groups_ready::awaited) wait_for_dependencies();
    const int rows = reduction ? gemm.k : gemm.m;
    return groups_type::template scan<plan.threads>(
        gemm, rows, reinterpret_cast<u32*>(memory + plan.groups_at));
  }

  // Where the threads of the producer warps begin that each have a part of their own.
  static constexpr int b_thread = 0, a_thread = 32;
  static constexpr int gather_thread = reduction && config.gather_warps == 4 ? 0 : 32;
  static constexpr int gather_threads = reduction ? config.gather_warps * 32 : row_gather_threads;
  static constexpr int index_thread = gather_thread + gather_threads;
  static_assert(index_thread + 32 <= plan.producer_warpgroups * 128);

  __device__ __forceinline__ void produce(const walked& groups, const stages& pipe,
                                          const row_indices& indices, int thread) const {
    if constexpr (reduction) {
      if (thread >= gather_thread && thread < index_thread) {
        gather_tokens(groups, pipe, indices, thread - gather_thread);
      }
    } else {
      if (thread >= b_thread && thread < b_thread + (looks_up_in_warps ? 32 : 1)) {
        load_b(groups, pipe, thread - b_thread);
      }
      if constexpr (gathers) {
        if (thread >= gather_thread && thread < index_thread) {
          gather_a(groups, pipe, indices, thread - gather_thread);
        }
      } else {
        if (thread >= a_thread && thread < a_thread + (scaled ? 32 : 1)) {
          load_a(groups, pipe, thread - a_thread);
        }
      }
    }
    if constexpr (!dense) {
      if (thread >= index_thread && thread < index_thread + 32) {
        sync(named_barrier::groups, plan.threads);
        if constexpr (finds_rows) {
          if constexpr (routed) wait_for_dependencies();
          if constexpr (counts) launch_dependents();
          find_rows(groups, indices);
        }
      }
    }
    // Completes the cluster_arrive() at the start, as the MMA warpgroups do before they reduce.
    if constexpr (splits_k) {
      __syncwarp();
      cluster_wait();
    }
  }

  __device__ __forceinline__ void specialise(const walked& groups, const stages& pipe,
                                             const row_indices& indices) const {
    const int producer = static_cast<int>(threadIdx.x) - mma_threads;  // negative: an MMA thread
    if (producer >= 0) {
      if constexpr (plan.reallocates_registers)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(int{plan.producer_registers}));
      produce(groups, pipe, indices, producer);
    } else {
      if constexpr (plan.reallocates_registers)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(int{plan.mma_registers}));
      compute(groups, pipe, indices, threadIdx.x / 128);
    }
  }

  static __device__ __forceinline__ void run(const sm90_params& params, unsigned char* memory) {
    const u32 start = shared_address(memory);
    const u32 base = (start + 1023) & ~1023u;  // swizzle atoms are 1024 bytes
    unsigned char* const aligned = memory + (base - start);
    const gemm_kernel self{params, params.gemm, base, plan.cluster_ctas == 1 ? 0 : cluster_rank()};
    const stages pipe{base, base + plan.full_barriers_at, base + plan.empty_barriers_at};
    const row_indices indices(aligned + plan.row_indices_at, base + plan.row_indices_at);
    const int producer = static_cast<int>(threadIdx.x) - mma_threads;
    if constexpr (dense) {
      if (producer == 64) self.prefetch_maps();
      if (threadIdx.x == 0) self.init_barriers(pipe, indices);
      // A split's CTAs need each other only for the reduction: they wait there.
      if constexpr (splits_k) {
        __syncthreads();
        cluster_arrive();
      } else if constexpr (plan.cluster_ctas > 1) {
        cluster_barrier();
      } else {
        __syncthreads();
      }
      launch_dependents();
      self.specialise({}, pipe, indices);
    } else {
      if (producer > 0 && producer % 32 == 0) {
        if (producer == 64) self.prefetch_maps();
        if constexpr (prefetches_operands) self.prefetch_operands(producer / 32);
      }
      if (producer == 0) self.init_barriers(pipe, indices);
      __syncwarp();
      if constexpr (plan.cluster_ctas > 1) cluster_arrive();
      const groups_type groups = self.build_groups(aligned);
      if constexpr (plan.cluster_ctas > 1 && !splits_k) cluster_wait();
      if constexpr (!counts) launch_dependents();
      const bool finds = producer >= index_thread && producer < index_thread + 32;
      if (!finds) arrive(named_barrier::groups, plan.threads);
      if constexpr (reduction) {
        wait_for_dependencies();  // all operands may be an earlier kernel's work
        self.specialise(groups, pipe, indices);
      } else {
        const group_tiles tiles(groups, reinterpret_cast<u32*>(aligned + plan.group_tiles_at));
        self.specialise(tiles, pipe, indices);
      }
    }
  }
};

template <gemm_form form, sm90_config config>
__global__ void __launch_bounds__(sm90_plan_of(form, config).threads,
                                  sm90_plan_of(form, config).ctas_per_sm)
    gemm_sm90(const __grid_constant__ sm90_params params) {
  extern __shared__ unsigned char shared_memory[];
  gemm_kernel<sm90_traits<form, config>>::run(params, shared_memory);
}

}  // namespace fftune
