// The producer warps of the sm_90a GEMM. Each has a role, a type with its threads and its loop over
// the work tiles:
//
//   Form                     warp 0            warps 1 to 3              index warp.
//   Dense                    tma_b             tma_a, scaled_tma_a       (none).
//   Grouped rows, A sorted   tma_b             tma_a, scaled_tma_a       rows of C, if not sorted.
//   Grouped rows, gathered   tma_b             (scaled_)gathered_a       rows of A and C.
//   Grouped reduction        gathered_tokens: both operands, 2 or 4      tokens of K blocks.
//
// They load into pipeline stages by TMA (tma_loader), with multicast in a cluster; by cp.async for
// gathered rows (row_gather) and for scales of fp8 (scale_loader); and by replay of rows that were
// gathered before.
#pragma once

#include "common/async.cuh"
#include "common/mma.cuh"
#include "gemm/epilogue_ops.cuh"
#include "gemm/sm90/config.cuh"
#include "gemm/sm90/pipeline.cuh"
#include "gemm/sm90/tile_scheduler.cuh"

namespace fftune {

// Loads this CTA's shares: part j of its tile row's A, part i of its tile column's B, for CTA (i,
// j) of a cluster. K-major operands are boxes of one K block; MN-major ones of 64 k x 64 elements
// of the other extent, side by side.
template <class Traits>
struct tma_loader {
  static constexpr gemm_form form = Traits::form;
  static constexpr sm90_config config = Traits::config;
  static constexpr int bk = Traits::plan.bk, row_bytes = 128;
  static constexpr int a_share = config.bm / config.cluster_n,
                       b_share = config.bn / config.cluster_m;
  static constexpr bool stacked_b = form.groups == grouping::rows && form.stacked;
  // Few rows: every B element is read once, hence evict_first.
  static constexpr l2_policy b_policy =
      config.swap_ab() && config.bm <= 64 ? l2_policy::evict_first : l2_policy::evict_normal;
  const sm90_params& params;
  int pair_blocks;  // K blocks of one K-concatenated pair
  int row_extent;   // of B: elements of a row
  u32 i, j;
  u16 row_ctas, column_ctas;

  __device__ __forceinline__ tma_loader(const sm90_params& all, const gemm_params& gemm, u32 rank)
      : params(all),
        pair_blocks(ceil_div(gemm.k, bk)),
        row_extent(form.b_major == major::k ? gemm.k : gemm.n),
        i(0),
        j(0),
        row_ctas(1),
        column_ctas(1) {
    if constexpr (config.split_k == 1) {
      i = rank / config.cluster_n, j = rank % config.cluster_n;
      row_ctas = static_cast<u16>(((1 << config.cluster_n) - 1) << i * config.cluster_n);
      column_ctas = 0;
#pragma unroll
      for (int cta = 0; cta < config.cluster_m; ++cta) {
        column_ctas |= static_cast<u16>(1 << (cta * config.cluster_n + j));
      }
    }
  }

  // The sharers of a box that is prefetched to L2, and not loaded.
  static constexpr int nobody = 0;
  // `matrix`: the index in a 3-D tensor map.
  template <int sharers, bool stacked>
  static __device__ __forceinline__ void load_box(u32 to, const tensor_map& map, u32 barrier,
                                                  int inner, int outer, int matrix, u16 ctas,
                                                  l2_policy policy) {
    if constexpr (sharers == nobody && stacked) {
      tma_prefetch(map, inner, outer, matrix);
    } else if constexpr (sharers == nobody) {
      tma_prefetch(map, inner, outer);
    } else if constexpr (sharers == 1 && stacked) {
      tma_load(to, map, barrier, inner, outer, matrix, policy);
    } else if constexpr (sharers == 1) {
      tma_load(to, map, barrier, inner, outer, policy);
    } else if constexpr (stacked) {
      tma_load_multicast(to, map, barrier, inner, outer, matrix, ctas, policy);
    } else {
      tma_load_multicast(to, map, barrier, inner, outer, ctas, policy);
    }
  }

  // `share` rows of an operand from `row` on, at [k, k + bk).
  template <int sharers, major layout, int share, bool stacked = false>
  static __device__ __forceinline__ void load_share(u32 to, const tensor_map& map, u32 full, int k,
                                                    int row, u16 ctas, l2_policy policy,
                                                    int matrix = 0) {
    if constexpr (layout == major::mn) {
      static_assert(share % 64 == 0);
#pragma unroll
      for (int slab = 0; slab < share / 64; ++slab) {
        load_box<sharers, stacked>(to + slab * wgmma_slab_bytes, map, full, row + slab * 64, k,
                                   matrix, ctas, policy);
      }
    } else {
      load_box<sharers, stacked>(to, map, full, k, row, matrix, ctas, policy);
    }
  }

  __device__ __forceinline__ bool of_second_pair(int k_block) const {
    return form.k_pairs() == 2 && k_block >= pair_blocks;
  }
  __device__ __forceinline__ int k_of(int k_block) const {
    return (of_second_pair(k_block) ? k_block - pair_blocks : k_block) * bk;
  }

  __device__ __forceinline__ void load_a(u32 buffer, u32 full, int k_block, int row,
                                         int output) const {
    const bool second = of_second_pair(k_block) || (form.outputs() == 2 && output == 1);
    load_share<config.cluster_n, form.a_major, a_share>(
        buffer + j * a_share * row_bytes, second ? params.a[1] : params.a[0], full, k_of(k_block),
        row + static_cast<int>(j) * a_share, row_ctas, l2_policy::evict_normal);
  }

  __device__ __forceinline__ void load_b(u32 buffer, u32 full, int k_block, int column,
                                         int group) const {
    boxes_of_b<config.cluster_m>(buffer, full, k_block, column, group);
  }
  __device__ __forceinline__ void prefetch_b(int k_block, int column, int group) const {
    boxes_of_b<nobody>(0, 0, k_block, column, group);
  }

 private:
  template <int sharers>
  __device__ __forceinline__ void boxes_of_b(u32 buffer, u32 full, int k_block, int column,
                                             int group) const {
    if constexpr (form.is_qkv() && form.qkv.separate) {
      const int part = params.qkv.part_of(column);
      const tensor_map& map = part == 0   ? params.b[0][0]
                              : part == 1 ? params.b[0][1]
                                          : params.b[1][0];
      load_share<sharers, form.b_major, b_share>(
          buffer + Traits::plan.a_bytes + i * b_share * row_bytes, map, full, k_of(k_block),
          column - params.qkv.first_column(part) + i * b_share, column_ctas, b_policy);
    } else {
#pragma unroll
      for (int operand = 0; operand < form.b_operands(); ++operand) {
        const int index = operand == 0 && !of_second_pair(k_block) ? 0 : 1;
        constexpr bool packed = form.b_packing != packing::separate;
        const tensor_map& map = packed                    ? params.b[0][0]
                                : stacked_b || group == 0 ? params.b[0][index]
                                                          : params.b[1][index];
        int k = k_of(k_block), row = column + i * b_share, matrix = group;
        if constexpr (form.b_packing == packing::halves) matrix = 2 * group + index;
        if constexpr (form.b_packing == packing::interleaved) {  // rows of both, side by side
          (form.b_major == major::k ? k : row) += index * row_extent;
        }
        load_share<sharers, form.b_major, b_share, stacked_b>(
            buffer + Traits::plan.a_bytes + operand * Traits::plan.b_bytes +
                i * b_share * row_bytes,
            map, full, k, row, column_ctas, b_policy, matrix);
      }
    }
  }
};

// Threads that gather for a CTA of grouped rows; each arrives at the full barrier of a stage.
constexpr int row_gather_threads = 64;

// Gathers rows by cp.async, 16 bytes a thread, in the layout that TMA would write. A thread copies
// 16 of each 128 bytes from every eighth or sixteenth row of a tile, so its swizzle is that of its
// first row.
//
// cp.async writes through the generic proxy and wgmma reads through the async proxy, so a proxy
// fence is needed in between. The MMA warpgroups issue it before each gathered K block, at no
// measurable cost. Gather warps would have to wait for their own copies before the fence and lose a
// tenth of the copy rate.
template <int height, int threads>
class row_gather {
  static constexpr int row_bytes = 128, chunks = row_bytes / 16;
  static constexpr int step = threads / chunks;  // rows of a pass
  static constexpr int passes = height / step;
  static_assert(step % 8 == 0 && height % step == 0);
  // Row indices are in registers, so that copies do not wait for each other; those that do not fit
  // are read again.
  static constexpr int kept = smaller(passes, 16);
  // Addresses that are there before the first of their copies, which else would wait for each other
  // to read the same registers.
  static constexpr int together = passes % 4 == 0 ? 4 : 1;

  const u32* rows_;
  u32 kept_[kept];
  int chunk_, first_;

 public:
  // `rows` is in shared memory; the first `kept` rows of this thread are read at once. `thread` is
  // one of the warps'.
  __device__ __forceinline__ row_gather(const u32* rows, int thread)
      : chunk_(thread % chunks), first_(thread / chunks) {
    rows_ = rows + first_;
#pragma unroll
    for (int i = 0; i < kept; ++i) kept_[i] = rows_[i * step];
  }

  // Begins to copy elements [column, column + 64 slabs) of the rows of a matrix with `columns`,
  // zeros past its end, into slabs of `height` rows of 64 elements.
  template <int slabs, class T>
  __device__ __forceinline__ void copy(const T* matrix, int columns, int column, u32 to) const {
    constexpr int elements = row_bytes / sizeof(T);
    const int own = column + chunk_ * 16 / static_cast<int>(sizeof(T));
    const u32 pitch = static_cast<u32>(columns) * sizeof(T);
    const char* const from = reinterpret_cast<const char*>(matrix + (own < columns ? own : 0));
    to += first_ * row_bytes + ((chunk_ ^ (first_ & 7)) << 4);
#pragma unroll
    for (int i = 0; i < passes; i += together) {
      const char* source[together];
#pragma unroll
      for (int j = 0; j < together; ++j) {
        u32 row = i + j < kept ? kept_[i + j < kept ? i + j : 0] : rows_[(i + j) * step];
        asm volatile("" : "+r"(row));  // else all addresses are kept, twice as many registers
        source[j] = from + static_cast<u64>(row) * pitch;
      }
#pragma unroll
      for (int slab = 0; slab < slabs; ++slab) {
        const bool valid = own + slab * elements < columns;
#pragma unroll
        for (int j = 0; j < together; ++j) {
          copy_async(to + (slab * height + (i + j) * step) * row_bytes,
                     source[j] + slab * row_bytes, valid);
        }
      }
    }
  }
};

// Four bytes.
__device__ __forceinline__ void copy_word_async(u32 shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

// Scales of fp8 of K blocks, each into its stage with the elements that it is of: a thread that
// promotes accumulators would wait for its own loads as long as all that the stages ask for takes
// to come. `threads` of the producer warps have a row of A each, or several; the last of them B's.
template <class Traits, int threads>
class scale_loader {
  static constexpr gemm_form form = Traits::form;
  static constexpr sm90_config config = Traits::config;
  static constexpr sm90_plan plan = Traits::plan;
  static constexpr int rows = (config.bm + threads - 1) / threads;
  static constexpr int of_b = form.b_operands() * plan.b_scale_blocks;
  static_assert(of_b <= threads);
  const gemm_params& params_;
  u32 a_[rows];  // where the scales of a row begin
  const float* b_;
  int thread_;

 public:
  // `row_of(i)`: whose scales row i of the tile has; `column`: its first one.
  template <class RowOf>
  __device__ __forceinline__ scale_loader(const gemm_params& params, int column, int group,
                                          int thread, const RowOf& row_of)
      : params_(params), b_(nullptr), thread_(thread) {
    const int blocks = blocks_of(params.k);
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const int own = smaller(thread + i * threads, config.bm - 1);
      a_[i] = static_cast<u32>(row_of(own)) * blocks;
    }
    if constexpr (of_b > 0) {
      const int own = threads - 1 - thread;
      if (own >= of_b) return;
      const int operand = own / plan.b_scale_blocks;
      const int block = column / scale_block + own % plan.b_scale_blocks;
      const int blocks_of_n = blocks_of(params.n);
      const int matrix = form.b_packing == packing::halves ? 2 * group + operand : group;
      b_ = (operand == 0 ? params.b_scale[0] : params.b_scale[1]) +
           (static_cast<i64>(matrix) * blocks_of_n + smaller(block, blocks_of_n - 1)) * blocks;
    }
  }

  __device__ __forceinline__ void copy(u32 to, int k_block) const {
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const int own = thread_ + i * threads;
      if (own < config.bm) copy_word_async(to + own * 4, params_.a_scale + (a_[i] + k_block));
    }
    if constexpr (of_b > 0) {
      if (b_ != nullptr) {
        copy_word_async(to + (config.bm + threads - 1 - thread_) * 4, b_ + k_block);
      }
    }
  }
};

// A reuse. cp.async takes a cycle of shared memory for every 32 bytes, TMA one for 128, and wide
// tiles leave few cycles. So of a_reuse tiles of the same rows the first one's rows are gathered,
// and as K blocks arrive, an MMA warpgroup stores them to memory in the layout of the stage. For
// the other tiles TMA loads them from there: replay.
//
// Two barriers say of a row of tiles that all but its last K blocks are there to be loaded, and
// that all are. Each is waited for once for each row that is stored, or the next could answer in
// its place.
struct replay_barriers {
  u32 most;

  __device__ __forceinline__ u32 all() const { return most + 8; }
  __device__ __forceinline__ void init() const {
    barrier_init(most, 1);
    barrier_init(all(), 1);
  }
  // Before `k_block` of the second tile is loaded; `phase`: of the number of rows stored before.
  __device__ __forceinline__ void wait(int k_block, int k_blocks, u32 phase) const {
    const int first_late = larger(k_blocks - sm90_late_k_blocks, 0);
    if (k_block != 0 && k_block != first_late) return;
    if (k_block == 0) barrier_wait(most, phase);
    if (k_block == first_late) barrier_wait(all(), phase);
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }
};

// Operations of one thread of the MMA warpgroups on the K blocks of a row of tiles. Row of tiles
// number i lies in rows [i bm, (i + 1) bm) of `map`; CTAs that have the same rows store the same
// bits there.
struct replay_store {
  const tensor_map& map;
  int row;
  bool stores;  // and this is the thread

  __device__ __forceinline__ void store(u32 buffer, int k) const {
    if (!stores) return;
    tma_store(map, buffer, k, row);
    tma_store_commit();
  }
  // All but the last `pending` stages may be loaded again.
  template <int pending>
  __device__ __forceinline__ void wait_read() const {
    if (stores) tma_store_wait_read<pending>();
  }
  // Arrives when all but the last `pending` groups of this thread's stores are complete.
  template <int pending>
  __device__ __forceinline__ void arrive(u32 barrier) const {
    if (!stores) return;
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
    barrier_arrive(barrier);
  }
};

// Without A reuse.
struct no_replay_barriers {
  u32 most;

  __device__ __forceinline__ u32 all() const { return most; }
  __device__ __forceinline__ void init() const {}
};
struct no_replay_store {
  __device__ __forceinline__ no_replay_store(const tensor_map&, int, bool) {}
  __device__ __forceinline__ void store(u32, int) const {}
  template <int pending>
  __device__ __forceinline__ void wait_read() const {}
  template <int pending>
  __device__ __forceinline__ void arrive(u32) const {}
};
template <class Traits>
struct replay_of {
  using barriers =
      typename choose_type<Traits::reuses_a, replay_barriers, no_replay_barriers>::type;
  using store = typename choose_type<Traits::reuses_a, replay_store, no_replay_store>::type;
};

// --- The roles of the producer warps ---

// State that every role of the kernel has.
template <class Traits>
struct cta_state {
  using scheduler = typename scheduler_of<Traits>::type;
  using domain = typename scheduler_of<Traits>::domain;  // what the scheduler walks

  const sm90_params& params;  // Holds the tensor maps.
  const gemm_params gemm;     // A copy, which the compiler may read again or keep, as it likes.
  u32 base;                   // Shared memory.
  u32 rank;                   // Rank in the cluster.

  __device__ __forceinline__ scheduler schedule(const domain& groups) const {
    return scheduler(gemm, groups, rank);
  }
  // The scales in the next stage.
  template <class Pipeline>
  __device__ __forceinline__ u32 scales_of(const Pipeline& pipe) const {
    return base + Traits::plan.scales_at + pipe.index * Traits::plan.scale_bytes;
  }
};

// A role is a type: `first_thread` and `threads` among the producers, and run(), which those
// threads execute.
template <class Traits>
struct role {
  static constexpr gemm_form form = Traits::form;
  static constexpr sm90_config config = Traits::config;
  static constexpr sm90_plan plan = Traits::plan;
  using T = element_type<form.ab>;
  using stages = pipeline<config.stages, plan.stage_bytes>;
  using loader = tma_loader<Traits>;
  using state = cta_state<Traits>;
  using scheduler = typename state::scheduler;
  using domain = typename state::domain;
  using row_indices = row_indices_of<Traits>;
};

// No threads have it.
template <class Traits>
struct no_role : role<Traits> {
  static constexpr int first_thread = 0, threads = 0;

  template <class... Arguments>
  static __device__ __forceinline__ void run(const Arguments&...) {}
};

// The step of B's thread to its next tile; `then` is that tile where its K blocks are prefetched.
struct plain_step {
  template <class Scheduler>
  static __device__ __forceinline__ void next(Scheduler& work, const Scheduler&) {
    work.next(1);
  }
};
struct prefetched_step {
  template <class Scheduler>
  static __device__ __forceinline__ void next(Scheduler& work, const Scheduler& then) {
    work.go(then.here());
  }
};

// B of every tile. One thread, or the first of a warp where a warp looks tiles up. It announces the
// bytes of A too if TMA always loads those; A's thread may well have begun to load them.
template <class Traits>
struct tma_b : role<Traits> {
  using base = role<Traits>;
  using base::config, base::form, base::plan;
  static constexpr bool in_warp = Traits::scaled && Traits::grouped_rows;
  static constexpr int first_thread = 0, threads = in_warp ? 32 : 1;
  static constexpr u32 bytes = Traits::gathers ? plan.stage_bytes - plan.a_bytes : plan.stage_bytes;
  // A group's weights come from memory, and few CTAs share them: a load of them takes longer than
  // the MMAs of the stages before it. So the first cluster of a group asks for K blocks in L2
  // before a stage is free. A CTA by itself would run ahead of those that share its B.
  static constexpr bool prefetches = Traits::grouped_rows && Traits::routed && !Traits::promotes &&
                                     (config.bm > 64) && (config.cluster_m > 1);
  static constexpr int prefetched_k_blocks = 4;
  using step = typename choose_type<prefetches, prefetched_step, plain_step>::type;

  static __device__ __forceinline__ void run(const cta_state<Traits>& cta,
                                             const typename base::domain& groups,
                                             typename base::stages pipe,
                                             const typename base::row_indices&, int lane) {
    const tma_loader<Traits> load(cta.params, cta.gemm, cta.rank);
    if (form.b_depends) wait_for_dependencies();
    typename base::scheduler work = cta.schedule(groups);
    const auto next = [&](const typename base::scheduler& then) { step::next(work, then); };
    for (typename base::scheduler then = work; work.is_valid(); next(then)) {
      const work_tile tile = work.tile();
      const int group = work.group(tile);
      for (int k_block = tile.k.first; k_block < tile.k.last; ++k_block, pipe.advance()) {
        pipe.wait_empty();
        if (in_warp && lane != 0) continue;
        barrier_arrive_expect(pipe.full_barrier(), bytes);
        load.load_b(pipe.buffer(), pipe.full_barrier(), k_block, tile.n * config.bn, group);
        if (prefetches) {
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
    cluster_of<Traits>::drain(pipe);
  }
};

// A of every tile. One thread.
template <class Traits>
struct tma_a : role<Traits> {
  using base = role<Traits>;
  static constexpr int first_thread = 32, threads = 1;

  static __device__ __forceinline__ void run(const cta_state<Traits>& cta,
                                             const typename base::domain& groups,
                                             typename base::stages pipe,
                                             const typename base::row_indices&, int) {
    const tma_loader<Traits> load(cta.params, cta.gemm, cta.rank);
    wait_for_dependencies();
    for (auto work = cta.schedule(groups); work.is_valid(); work.next(1)) {
      const work_tile tile = work.tile();
      const int row = work.first_row(tile);
      for (int k_block = tile.k.first; k_block < tile.k.last; ++k_block, pipe.advance()) {
        pipe.wait_empty();
        load.load_a(pipe.buffer(), pipe.full_barrier(), k_block, row, tile.output);
      }
    }
  }
};

// The row whose scales apply to row i of a tile. Padding uses those of the last row.
template <class Traits>
__device__ __forceinline__ int scaled_row(const gemm_params& gemm, const group_tile& own, int i) {
  const int rank = larger(smaller(i, own.count - 1), 0);
  const int sorted = smaller(own.first + rank, gemm.m - 1);
  if (Traits::grouped_rows && !Traits::form.a_scales_sorted) return gemm.permutation[sorted];
  return sorted;
}

// The same with scales of K blocks, which the lanes of a warp copy.
template <class Traits>
struct scaled_tma_a : role<Traits> {
  using base = role<Traits>;
  static constexpr int first_thread = 32, threads = 32;

  static __device__ __forceinline__ void run(const cta_state<Traits>& cta,
                                             const typename base::domain& groups,
                                             typename base::stages pipe,
                                             const typename base::row_indices&, int lane) {
    const tma_loader<Traits> load(cta.params, cta.gemm, cta.rank);
    wait_for_dependencies();
    for (auto work = cta.schedule(groups); work.is_valid(); work.next(1)) {
      const work_tile tile = work.tile();
      const group_tile own = work.rows(tile);
      const scale_loader<Traits, threads> scales(
          cta.gemm, static_cast<int>(tile.n) * base::config.bn, own.group, lane,
          [&](int i) { return scaled_row<Traits>(cta.gemm, own, i); });
      for (int k_block = tile.k.first; k_block < tile.k.last; ++k_block, pipe.advance()) {
        pipe.wait_empty();
        if (lane == 0) {
          load.load_a(pipe.buffer(), pipe.full_barrier(), k_block, own.first, tile.output);
        }
        scales.copy(cta.scales_of(pipe), k_block);
        barrier_arrive_copied(pipe.full_barrier());
      }
    }
  }
};

// A of every tile of grouped rows that may have to be gathered. The first thread has TMA load rows
// that are consecutive. Both warps fill every stage, so that neither is a phase behind.
template <class Traits>
struct gathered_a : role<Traits> {
  using base = role<Traits>;
  using base::config, base::plan;
  using T = typename base::T;
  static constexpr int first_thread = 32, threads = row_gather_threads;
  static constexpr bool reuses_a = Traits::reuses_a;

  static __device__ __forceinline__ void run(const cta_state<Traits>& cta,
                                             const typename base::domain& groups,
                                             typename base::stages pipe,
                                             typename base::row_indices indices, int thread) {
    const replay_barriers replay{cta.base + plan.reuse_barriers_at};
    bool replays = false;
    u32 phase = 0;
    wait_for_dependencies();
    for (auto work = cta.schedule(groups); work.is_valid(); work.next(1)) {
      const k_range k = work.tile().k;
      const tile_rows own = indices.wait();
      const bool consecutive = own.consecutive();
      if (!consecutive && work.first()) {
        const row_gather<config.bm, threads> gather(own.rows, thread);
        for (int k_block = k.first; k_block < k.last; ++k_block, pipe.advance()) {
          pipe.wait_empty();
          gather.template copy<1>(static_cast<const T*>(cta.gemm.a[0]), cta.gemm.k,
                                  k_block * plan.bk, pipe.buffer());
          barrier_arrive_copied(pipe.full_barrier());
        }
      } else if (thread % 32 == 0) {
        const tensor_map& a = consecutive || !reuses_a ? cta.params.a[0] : cta.params.reuse;
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
};

// The same with scales of K blocks. The scales of a row lie as the rows do.
template <class Traits>
struct scaled_gathered_a : role<Traits> {
  using base = role<Traits>;
  using base::config, base::plan;
  using T = typename base::T;
  static constexpr int first_thread = 32, threads = row_gather_threads;

  static __device__ __forceinline__ void run(const cta_state<Traits>& cta,
                                             const typename base::domain& groups,
                                             typename base::stages pipe,
                                             typename base::row_indices indices, int thread) {
    wait_for_dependencies();
    for (auto work = cta.schedule(groups); work.is_valid(); work.next(1)) {
      const work_tile tile = work.tile();
      const tile_rows own = indices.wait();
      const group_tile rows = work.rows(tile);
      const bool consecutive = own.consecutive();
      const row_gather<config.bm, threads> gather(own.rows, thread);
      const scale_loader<Traits, threads> scales(
          cta.gemm, static_cast<int>(tile.n) * config.bn, rows.group, thread,
          [&](int i) { return rows.count > 0 ? static_cast<int>(own.rows[i]) : 0; });
      for (int k_block = tile.k.first; k_block < tile.k.last; ++k_block, pipe.advance()) {
        pipe.wait_empty();
        if (!consecutive) {
          gather.template copy<1>(static_cast<const T*>(cta.gemm.a[0]), cta.gemm.k,
                                  k_block * plan.bk, pipe.buffer());
        } else if (thread == 0) {
          barrier_expect(pipe.full_barrier(), plan.a_bytes);
          tma_load(pipe.buffer(), cta.params.a[0], pipe.full_barrier(), k_block * plan.bk,
                   own.first(), l2_policy::evict_normal);
        }
        scales.copy(cta.scales_of(pipe), k_block);
        barrier_arrive_copied(pipe.full_barrier());
      }
      __syncwarp();
      indices.advance();
    }
  }
};

// An operand of a grouped reduction as its gather warps load it where tokens are not consecutive:
// TMA loads one in sorted order in any case.
struct sorted_operand {
  template <int slabs, class T, class Gather>
  static __device__ __forceinline__ void gather(const Gather&, const void*, int, int, u32) {}
};
struct gathered_operand {
  template <int slabs, class T, class Gather>
  static __device__ __forceinline__ void gather(const Gather& rows, const void* matrix, int columns,
                                                int column, u32 to) {
    rows.template copy<slabs>(static_cast<const T*>(matrix), columns, column, to);
  }
};

// Both operands of every K block of a grouped reduction. If TMA loads an operand, the first thread
// of one warp issues A and that of another B, and each announces its bytes.
template <class Traits>
struct gathered_tokens : role<Traits> {
  using base = role<Traits>;
  using base::config, base::form, base::plan;
  using T = typename base::T;
  using loader = typename base::loader;
  static constexpr bool gathers = Traits::gathers;
  static constexpr int first_thread = config.gather_warps == 4 ? 0 : 32,
                       threads = config.gather_warps * 32;
  using a_operand = typename choose_type<form.a_sorted, sorted_operand, gathered_operand>::type;
  using b_operand = typename choose_type<form.b_sorted, sorted_operand, gathered_operand>::type;

  static __device__ __forceinline__ void run(const cta_state<Traits>& cta,
                                             const typename base::domain& groups,
                                             typename base::stages pipe,
                                             typename base::row_indices indices, int thread) {
    const bool has_a = thread == 0, has_b = thread == 32;
    const loader load(cta.params, cta.gemm, cta.rank);
    for (auto work = cta.schedule(groups); work.is_valid(); work.next(1)) {
      const work_tile tile = work.tile();
      const tensor_map& a =
          form.outputs() == 2 && tile.output == 1 ? cta.params.a[1] : cta.params.a[0];
      const int row = tile.m * config.bm, column = tile.n * config.bn;
      for (int k_block = tile.k.first; k_block < tile.k.last; ++k_block, pipe.advance()) {
        const int sorted = work.tokens(tile.group, k_block, plan.bk).first;
        const int in_stage = (k_block - tile.k.first) % sm90_reduction_lookahead;
        const tile_rows tokens = gathers ? indices.wait(in_stage) : indices.unread();
        const row_gather<sm90_reduction_tokens, threads> gather(tokens.rows, thread);
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
              cta.params.b[0][0], pipe.full_barrier(), form.b_sorted ? sorted : tokens.first(),
              column + load.i * loader::b_share, load.column_ctas, l2_policy::evict_normal);
        }
        __syncwarp();
        if (consecutive) {
          if (thread % 32 == 0) barrier_arrive(pipe.full_barrier(), 32);  // in place of its warp
          continue;
        }
        a_operand::template gather<config.bm / 64, T>(gather, cta.gemm.a[0], cta.gemm.m, row,
                                                      pipe.buffer());
        b_operand::template gather<config.bn / 64, T>(gather, cta.gemm.b[0][0], cta.gemm.n, column,
                                                      pipe.buffer() + plan.a_bytes);
        barrier_arrive_copied(pipe.full_barrier());
      }
    }
    cluster_of<Traits>::drain(pipe);
  }
};

// The index warp: which rows, or tokens, the tiles have.
template <class Traits>
struct no_lookup : role<Traits> {
  template <class... State>
  static __device__ __forceinline__ void fill(const State&...) {}
};
template <class Traits>
struct row_lookup : role<Traits> {
  using base = role<Traits>;
  static __device__ __forceinline__ void fill(const cta_state<Traits>& cta,
                                              const typename base::domain& groups,
                                              typename base::row_indices indices) {
    for (auto work = cta.schedule(groups); work.is_valid(); work.next_rows()) {
      indices.fill(groups.groups(), work.rows(work.tile()));
    }
  }
};
template <class Traits>
struct token_lookup : role<Traits> {
  using base = role<Traits>;
  static __device__ __forceinline__ void fill(const cta_state<Traits>& cta,
                                              const typename base::domain& groups,
                                              typename base::row_indices indices) {
    for (auto work = cta.schedule(groups); work.is_valid(); work.next(1)) {
      const work_tile tile = work.tile();
      for (int k_block = tile.k.first; k_block < tile.k.last; k_block += sm90_reduction_lookahead) {
        indices.fill(groups, work.tokens(tile.group, k_block, base::row_indices::rows));
      }
    }
  }
};

// All threads arrive when the groups are in shared memory, and the index warp waits for them. Where
// the kernel began before the groups were sorted (`counts`), this warp waits for them and then lets
// the next launch start: that launch may take for settled what this one has waited for.
template <class Traits, int first>
struct index_warp : role<Traits> {
  using base = role<Traits>;
  static constexpr int first_thread = first, threads = 32;
  static constexpr bool finds = Traits::finds_rows;
  static constexpr bool counts = Traits::routed && Traits::form.ready == groups_ready::counted;
  static_assert(!counts || finds);
  static_assert(first_thread + threads <= base::plan.producer_warpgroups * 128);
  using lookup = typename choose_type<!finds, no_lookup<Traits>,
                                      typename choose_type<Traits::grouped_rows, row_lookup<Traits>,
                                                           token_lookup<Traits>>::type>::type;

  static __device__ __forceinline__ void run(const cta_state<Traits>& cta,
                                             const typename base::domain& groups,
                                             const typename base::stages&,
                                             const typename base::row_indices& indices, int) {
    sync(named_barrier::groups, base::plan.threads);
    if (finds && Traits::routed) wait_for_dependencies();
    if (counts) launch_dependents();
    lookup::fill(cta, groups, indices);
  }
};

// The roles of a form. The index warp has the last threads.
template <class Traits, grouping groups = Traits::form.groups, bool gathers = Traits::gathers>
struct roles_of {  // dense
  using first = tma_b<Traits>;
  using second = typename choose_type<Traits::scaled, scaled_tma_a<Traits>, tma_a<Traits>>::type;
  using index = no_role<Traits>;
};
template <class Traits>
struct roles_of<Traits, grouping::rows, false> : roles_of<Traits, grouping::none> {
  using index = index_warp<Traits, 32 + row_gather_threads>;
};
template <class Traits>
struct roles_of<Traits, grouping::rows, true> {
  using first = tma_b<Traits>;
  using second =
      typename choose_type<Traits::scaled, scaled_gathered_a<Traits>, gathered_a<Traits>>::type;
  using index = index_warp<Traits, second::first_thread + second::threads>;
};
template <class Traits, bool gathers>
struct roles_of<Traits, grouping::reduction, gathers> {
  using first = gathered_tokens<Traits>;
  using second = no_role<Traits>;
  using index = index_warp<Traits, first::first_thread + first::threads>;
};

}  // namespace fftune
