// Loads into a pipeline stage of the sm_90a GEMM by the producer warps: TMA, with multicast in a
// cluster; cp.async for gathered rows, and for scales of fp8; and replay of rows that were gathered
// before.
#pragma once

#include "common/async.cuh"
#include "common/mma.cuh"
#include "gemm/epilogue_ops.cuh"
#include "gemm/scales.cuh"
#include "gemm/sm90/params.cuh"
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

}  // namespace fftune
