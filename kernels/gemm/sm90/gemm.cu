// The sm_90a GEMM: C = epilogue(A·Bᵀ) with TMA and wgmma, dense, of grouped rows, and as a grouped
// reduction: one persistent, warp-specialised kernel for every form (gemm/form.cuh).
//
//   producer warps              shared memory          MMA warpgroups (1 to 3)
//  +-------------------------+  +-------------------+  +------------------------------+
//  | warp 0  TMA: B          |  | stages: A|B0(|B1) |  | mainloop.cuh: wgmma          |
//  | warp 1  TMA: A          |->| of one K block,   |->| into accumulators            |
//  |  or 1-2 gather A's rows |  | rows of 128 bytes |  |              |               |
//  |  or 0-3 gather tokens   |  +-------------------+  |              v               |
//  |         (load.cuh)      |  | split-K reduction |<-> pipeline.cuh: DSMEM split-K  |
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
#include "gemm/sm90/load.cuh"
#include "gemm/sm90/mainloop.cuh"
#include "gemm/sm90/pipeline.cuh"
#include "gemm/sm90/qkv_epilogue.cuh"

namespace fftune {

struct no_operand_prefetch {
  template <class Kernel>
  static __device__ __forceinline__ void run(const Kernel&, int) {}
};
// While the mask is being loaded: prefetches both groups' B for the expected first tile of this
// CTA, and its expected rows, to L2. The mask decides which tile and group it is, but
// some CTA needs all of this data, unless one group has no rows. One in four of the CTAs that
// share it prefetches it. Dual GEMMs, and programmatic launches that wait for an earlier kernel,
// do not gain from it. One thread of each of three warps, by number.
template <class Traits>
struct operand_prefetch {
  static constexpr gemm_form form = Traits::form;
  static constexpr sm90_config config = Traits::config;
  using loader = tma_loader<Traits>;

  static __device__ __forceinline__ void run(const cta_state<Traits>& cta, int warp) {
    const tile_raster<Traits> raster(
        cta.gemm.m + config.bm, rows_scheduler<Traits>::raster_n(cta.gemm.n), cta.gemm.group_m);
    tile_position at = raster.position(cta.rank);
    at.n *= config.a_reuse;
    const bool rows = warp == 1;
    if (!raster.is_valid() || (rows ? at.n : at.m / config.cluster_m) % 4 != 0) return;
    const k_range range = k_range_of<Traits>(cta.gemm.k, cta.rank);
    const int last = smaller(range.last, range.first + config.stages);
    const u32 share = Traits::splits_k ? 0 : cta.rank;
    const int row = at.m * config.bm, column = at.n * config.bn + share * loader::b_share;
    const tensor_map& b = warp == 2 ? cta.params.b[0][0] : cta.params.b[1][0];
    for (int k_block = range.first; k_block < last; ++k_block) {
      const int k = k_block * Traits::plan.bk;
      if (rows) {
        tma_prefetch(cta.params.a[0], k, row);
      } else if constexpr (form.b_major == major::mn) {
#pragma unroll
        for (int slab = 0; slab < loader::b_share; slab += 64) tma_prefetch(b, column + slab, k);
      } else {
        tma_prefetch(b, k, column);
      }
    }
  }
};

template <class Traits>
struct gemm_kernel : cta_state<Traits> {
  static constexpr gemm_form form = Traits::form;
  static constexpr sm90_config config = Traits::config;
  static constexpr sm90_plan plan = Traits::plan;
  static constexpr bool dense = Traits::dense, grouped_rows = Traits::grouped_rows;
  static constexpr bool reduction = Traits::reduction, routed = Traits::routed;
  static constexpr bool gathers = Traits::gathers, reuses_a = Traits::reuses_a;
  static constexpr int mma_threads = config.mma_warpgroups * 128;
  static_assert(dense || sm90_registers_fit(plan, config));
  static_assert(dense || !Traits::promotes ||
                (grouped_rows && routed && form.c_sorted && !reuses_a));
  static_assert(!grouped_rows || (form.a_major == major::k && form.outputs() == 1));
  static_assert(!grouped_rows || form.a_sorted || (config.cluster_n == 1 && form.k_pairs() == 1));
  static_assert(!reuses_a || (gathers && !form.is_gradient()));
  static_assert(!reduction || (form.a_major == major::mn && form.b_major == major::mn));
  static_assert(form.outputs() == 1 || dense || form.a_sorted);
  using groups_type = typename Traits::groups;
  static_assert(groups_type::shared_words == (routed ? sm90_offsets_words : sm90_mask_words) ||
                dense);

  using state = cta_state<Traits>;
  static constexpr bool splits_k = Traits::splits_k, finds_rows = Traits::finds_rows;

  // The variants, each a type:
  using scheduler = typename state::scheduler;  // tile_scheduler.cuh
  using domain = typename state::domain;        // the groups whose tiles it walks
  using step = typename step_of<Traits>::type;  // to the next tile
  using cluster = cluster_of<Traits>;           // pipeline.cuh: how CTAs meet
  using row_indices = row_indices_of<Traits>;
  using roles = roles_of<Traits>;          // load.cuh: producer warps
  using replay = replay_of<Traits>;        // A reuse
  using mma_order = mma_order_of<Traits>;  // mainloop.cuh: cooperative or ping-pong
  using mainloop = mainloop_of<Traits>;
  using stage_hooks = stages_of<Traits>;       // fences, zero fill, stores for the replay
  using terms = terms_of<Traits>;              // row factors, group biases
  using split_k = split_k_of<Traits>;          // pipeline.cuh
  using destination = destination_of<Traits>;  // epilogue.cuh: where a tile goes
  using epilogue = epilogue_of<Traits>;

  using operands = typename choose_type<grouped_rows && gathers && form.b_operands() == 1 &&
                                            !routed && !form.stacked,
                                        operand_prefetch<Traits>, no_operand_prefetch>::type;
  using stages = pipeline<config.stages, plan.stage_bytes>;
  using accumulators = typename mainloop::accumulators;

  using state::base, state::gemm, state::params, state::rank, state::schedule;

  // --- Load: the producer warps ---

  __device__ __forceinline__ void load(const domain& groups, const stages& pipe,
                                       const row_indices& indices, int thread) const {
    execute<typename roles::first>(groups, pipe, indices, thread);
    execute<typename roles::second>(groups, pipe, indices, thread);
    execute<typename roles::index>(groups, pipe, indices, thread);
    cluster::finish();
  }
  template <class Role>
  __device__ __forceinline__ void execute(const domain& groups, const stages& pipe,
                                          const row_indices& indices, int thread) const {
    if (thread >= Role::first_thread && thread < Role::first_thread + Role::threads) {
      Role::run(*this, groups, pipe, indices, thread - Role::first_thread);
    }
  }

  // --- MMA warpgroups ---

  // Work on a pipeline stage besides its MMAs (mma_mainloop).
  template <class Prefetch, class LookAhead>
  struct hooks : stage_hooks {
    int prefetch_at;  // the K block after whose MMAs the source is asked for
    const Prefetch& prefetch;
    const LookAhead& look_ahead;

    __device__ __forceinline__ void on_issued(int k_block) const {
      if constexpr (form.is_gradient()) {
        if (k_block == prefetch_at) prefetch();
      }
    }
    __device__ __forceinline__ void on_all_issued() const { look_ahead(); }
  };

  // Where this warpgroup's share of a tile goes; for a reducer, its share of the columns.
  __device__ __forceinline__ output_tile output_of(const scheduler& work, const work_tile& tile,
                                                   const row_indices& indices,
                                                   int first_row) const {
    const int share = split_k::first_column(rank);  // of the columns of the MMAs
    const int m = config.swap_ab() ? share : first_row, n = config.swap_ab() ? first_row : share;
    const int column = static_cast<int>(tile.n) * config.bn + n;
    return destination::place(gemm, work, tile, indices, m, column);
  }

  // Compute, reduce, store: an MMA warpgroup.
  __device__ __forceinline__ void compute(const domain& groups, stages pipe, row_indices indices,
                                          int warpgroup) const {
    const int first_row = config.pingpong() ? 0 : warpgroup * plan.warpgroup_rows;
    epilogue out(params, gemm, base, warpgroup);
    const typename replay::barriers stored{base + plan.reuse_barriers_at};
    scheduler work = schedule(groups);
    const mma_order order{warpgroup};
    order.template start<epilogue>(work, pipe, indices);
    alignas(16) accumulators acc;
    bool met = false;  // the other CTAs of a split
    bool last_of_rows = true;
    u32 ordinal = order.first();
    step to_next(work);
    const auto look_ahead = [&] { to_next.look_ahead(work, order.step); };
    const auto next = [&] {
      to_next.next(work, order.step);
      ordinal += order.step;
      if constexpr (finds_rows && grouped_rows) indices.advance(last_of_rows ? order.step : 0);
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
        if constexpr (epilogue::prefetches_next) {
          if (ordinal == 0) out.prefetch_first(tile_after);
        } else {
          out.prefetch_source(output_of(work, tile, indices, first_row));
        }
      };
      if constexpr (form.adds_source) {
        if (reduction ? rank == tile.reducer : !splits_k || rank < plan.reducers) prefetch_source();
      }
      order.before_mmas();
      const mainloop loop(first_row, rank, gemm, base + plan.scales_at, work, tile);
      const auto replay_to = [&](int row) {
        const bool stores = reuses_a && gathered && !last_of_rows && threadIdx.x == 0;
        return typename replay::store{params.reuse, row, stores};
      };
      const auto kept = replay_to(static_cast<int>(tile.m) * config.bm);
      const int tokens = scheduler::tokens_left(groups, tile);
      const int prefetch_at = epilogue::source_k_block(tile.k.count());
      const hooks<decltype(prefetch_source), decltype(look_ahead)> others{
          {tokens, gathered, kept, warpgroup}, prefetch_at, prefetch_source, look_ahead};
      loop.run(acc, pipe, tile.k, others);
      kept.template arrive<sm90_late_k_blocks>(stored.most);
      order.after_mmas(work, pipe);
      loop.scale(acc);
      terms::apply(acc, gemm, work, tile, first_row);

      const u32 buffers = base + plan.reduction_at, arrived = base + plan.reduction_barrier_at;
      if constexpr (reduction) {
        tile = work.tile();  // once more: until here every register is needed
        if constexpr (splits_k) {
          if (!met) cluster_wait();  // the other CTAs have started, and their barriers are there
          met = true;
          const split_k across{buffers, arrived, rank};
          if (rank != tile.reducer) {
            across.send(acc, tile.reducer);
            continue;
          }
          across.receive(acc, tile.senders);
        }
      } else if constexpr (splits_k) {
        const split_k across{buffers, arrived, rank};
        const auto reduce_to = [&](typename split_k::fragment& total) {
          across.reduce(acc, total);
          if (rank < plan.reducers) out.store(total, output_of(work, tile, indices, first_row));
        };
        if constexpr (plan.reducers == 1) {
          reduce_to(acc);  // in place: no registers for the sums
        } else {
          typename split_k::fragment total;
          reduce_to(total);
        }
        if (rank >= plan.reducers) return;
      }
      if constexpr (epilogue::prefetches_next) {
        out.store_and_prefetch(acc, ordinal, tile_after);
      } else if constexpr (reduction || !splits_k) {
        out.store(acc, output_of(work, tile, indices, first_row));
      }
      // Made again: until here every register is needed.
      replay_to(0).template arrive<plan.subtiles * form.stored_values()>(stored.all());
      if constexpr (grouped_rows && finds_rows) {
        if (last_of_rows) indices.release();
      }
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
  }

  // --- Start: all threads ---

  // One thread: all barriers of the CTA.
  __device__ __forceinline__ void init_barriers(const stages& pipe,
                                                const row_indices& indices) const {
    // Arrivals that fill a stage.
    constexpr u32 arrivals = reduction        ? config.gather_warps * 32
                             : gathers        ? 1 + row_gather_threads
                             : Traits::scaled ? 1 + 32
                                              : 1;
    if (!dense)
      indices.init(reduction           ? config.gather_warps
                   : config.pingpong() ? 4
                                       : 4 * config.mma_warpgroups);
    typename replay::barriers{base + plan.reuse_barriers_at}.init();
    for (int stage = 0; stage < config.stages; ++stage) {
      barrier_init(pipe.full + stage * 8, arrivals);
      barrier_init(pipe.empty + stage * 8, mainloop::releases *
                                               (config.pingpong() ? 1 : config.mma_warpgroups) *
                                               (config.cluster_m + config.cluster_n - 1));
    }
    for (int stage = 0;
         stage < (form.adds_source || form.is_gradient() ? plan.epilogue_barriers : 0); ++stage) {
      barrier_init(base + plan.epilogue_barriers_at + stage * 8, 1);
    }
    split_k::init(base, rank);
    barrier_init_fence();
  }

  // One thread.
  __device__ __forceinline__ void prefetch_maps() const {
    constexpr bool two_groups = grouped_rows && !form.stacked;
    constexpr bool two_operands =
        form.b_operands() * form.k_pairs() == 2 && form.b_packing == packing::separate;
    constexpr bool three_parts = form.is_qkv() && form.qkv.separate;
    tma_prefetch(params.b[0][0]);
    if (two_groups) tma_prefetch(params.b[1][0]);
    if (two_operands) tma_prefetch(params.b[0][1]);
    if (two_operands && two_groups) tma_prefetch(params.b[1][1]);
    if (three_parts) {
      tma_prefetch(params.b[0][1]);
      tma_prefetch(params.b[1][0]);
    }
    tma_prefetch(params.a[0]);
    tma_prefetch(form.is_gradient() ? params.source[0] : params.out[0]);
    if (reduction && !form.stacked) tma_prefetch(params.out[sm90_out_index(form, 0, 0, 1)]);
  }

  // The groups, once the block has them; all threads. A mask is older than the kernel before this
  // one, so it is read without a wait; routed groups may be written by that kernel (groups_ready).
  __device__ __forceinline__ groups_type build_groups(unsigned char* memory) const {
    if (routed && form.ready == groups_ready::awaited) wait_for_dependencies();
    const int rows = reduction ? gemm.k : gemm.m;
    return groups_type::template scan<plan.threads>(
        gemm, rows, reinterpret_cast<u32*>(memory + plan.groups_at));
  }

  // The MMA warpgroups compute while the producer warps load. Registers move from these to those.
  __device__ __forceinline__ void specialise(const domain& groups, const stages& pipe,
                                             const row_indices& indices) const {
    const int producer = static_cast<int>(threadIdx.x) - mma_threads;  // negative: an MMA thread
    if (producer >= 0) {
      if constexpr (plan.reallocates_registers)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(int{plan.producer_registers}));
      load(groups, pipe, indices, producer);
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
    const gemm_kernel self{
        {params, params.gemm, base, plan.cluster_ctas == 1 ? 0 : cluster_rank()}};
    const stages pipe{base, base + plan.full_barriers_at, base + plan.empty_barriers_at};
    const row_indices indices(aligned + plan.row_indices_at, base + plan.row_indices_at);
    const int producer = static_cast<int>(threadIdx.x) - mma_threads;
    if constexpr (dense) {
      if (producer == 64) self.prefetch_maps();
      if (threadIdx.x == 0) self.init_barriers(pipe, indices);
      cluster::start();
      launch_dependents();
      self.specialise({}, pipe, indices);
    } else {
      using index = typename roles::index;
      if (producer > 0 && producer % 32 == 0) {
        if (producer == 64) self.prefetch_maps();
        operands::run(self, producer / 32);
      }
      if (producer == 0) self.init_barriers(pipe, indices);
      __syncwarp();
      cluster::arrive();
      const groups_type groups = self.build_groups(aligned);
      cluster::wait();
      if (!index::counts) launch_dependents();
      const bool finds =
          producer >= index::first_thread && producer < index::first_thread + index::threads;
      if (!finds) arrive(named_barrier::groups, plan.threads);
      if constexpr (reduction) {
        wait_for_dependencies();  // all operands may be an earlier kernel's work
        self.specialise(groups, pipe, indices);
      } else {
        const domain tiles(groups, reinterpret_cast<u32*>(aligned + plan.group_tiles_at));
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
