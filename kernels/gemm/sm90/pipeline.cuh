// How the warps and CTAs of the sm_90a GEMM meet and exchange data through shared memory: named
// barriers, clusters, the pipeline of gathered row indices, and the DSMEM split-K reduction. (The
// pipeline of K blocks is in common/async.cuh.)
#pragma once

#include "common/async.cuh"
#include "gemm/groups.cuh"
#include "gemm/sm90/config.cuh"

namespace fftune {

// Named barriers (bar.sync, bar.arrive). 0 is __syncthreads'.
enum class named_barrier {
  epilogue = 1,       // + MMA warpgroup: its 128 threads, around each subtile.
  mma_order = 4,      // + MMA warpgroup, ping-pong: order of the main loops.
  source_order = 6,   // + MMA warpgroup, ping-pong: order of the shared epilogue stages.
  zero_fill = 8,      // + MMA warpgroup, if ping-pong; grouped reduction: the K tail is zero.
  groups = 10,        // The groups are in shared memory: all arrive, the index warp waits.
  block_scales = 11,  // Two MMA warpgroups that compute the scales of C: their maxima are there,
                      // read.
};

__device__ __forceinline__ void sync(named_barrier barrier, int threads, int offset = 0) {
  named_barrier_sync(static_cast<int>(barrier) + offset, threads);
}
__device__ __forceinline__ void arrive(named_barrier barrier, int threads, int offset = 0) {
  named_barrier_arrive(static_cast<int>(barrier) + offset, threads);
}

// How the CTAs of a cluster meet. start() or arrive() and wait(): each CTA's barriers are there
// before another CTA signals them. finish(), for the producers: no CTA exits while another still
// accesses its shared memory.
struct single_cta {
  static __device__ __forceinline__ void start() { __syncthreads(); }
  static __device__ __forceinline__ void arrive() {}
  static __device__ __forceinline__ void wait() {}
  template <class Pipeline>
  static __device__ __forceinline__ void drain(Pipeline&) {}
  static __device__ __forceinline__ void finish() {}
};
// CTAs that multicast operands to each other.
struct multicast_cluster : single_cta {
  static __device__ __forceinline__ void start() { cluster_barrier(); }
  static __device__ __forceinline__ void arrive() { cluster_arrive(); }
  static __device__ __forceinline__ void wait() { cluster_wait(); }
  template <class Pipeline>
  static __device__ __forceinline__ void drain(Pipeline& pipe) {
    pipe.drain();
  }
};
// CTAs that share the k of a tile need each other only for the reduction: the MMA warpgroups wait
// there, and the producers at their end.
struct split_k_cluster : single_cta {
  static __device__ __forceinline__ void start() {
    __syncthreads();
    cluster_arrive();
  }
  static __device__ __forceinline__ void arrive() { cluster_arrive(); }
  static __device__ __forceinline__ void finish() {
    __syncwarp();
    cluster_wait();
  }
};
template <class Traits>
using cluster_of =
    typename choose_type<Traits::splits_k, split_k_cluster,
                         typename choose_type<(Traits::plan.cluster_ctas > 1), multicast_cluster,
                                              single_cta>::type>::type;

// The rows of A (of tokens, in a grouped reduction) of one tile.
struct tile_rows {
  static constexpr u32 scattered = 0x80000000;
  u32 word;         // the first of them, and whether they are scattered rather than consecutive
  const u32* rows;  // in shared memory

  __device__ __forceinline__ bool consecutive() const { return (word & scattered) == 0; }
  __device__ __forceinline__ int first() const { return static_cast<int>(word & ~scattered); }
};

// Two stages of gathered row indices: the rows of a tile are looked up while those of the tile
// before are in use. A stage may have the rows of several tiles of `height` that follow each other
// in their group.
template <int height, int tiles = 1>
class row_index_pipeline {
  static_assert(tiles <= 4);
  static constexpr int all = height * tiles, words = all + 4;
  pipeline<2, words * 4> state_;
  u32* tables_;
  // Where the lookup of the next rows starts.
  int next_ = -1;
  u32 cursor_ = 0;

 public:
  // Rows of a stage; bytes of shared memory for both, a multiple of 16.
  static constexpr int rows = all, bytes = 2 * words * 4 + 4 * 8;

  // `memory` is `shared` as a pointer.
  __device__ __forceinline__ row_index_pipeline(unsigned char* memory, u32 shared)
      : state_{shared, shared + 2 * words * 4, shared + 2 * words * 4 + 16},
        tables_(reinterpret_cast<u32*>(memory)) {}

  // One thread; `readers` warps release each stage.
  __device__ __forceinline__ void init(u32 readers) const {
    for (int i = 0; i < 2; ++i) {
      barrier_init(state_.full + i * 8, 32);
      barrier_init(state_.empty + i * 8, 32 * readers);
    }
  }

  __device__ __forceinline__ void advance() { state_.advance(); }
  __device__ __forceinline__ void advance(u32 count) { state_.advance(count); }

  // The rows of the next stage. All lanes of a warp.
  template <class Groups>
  __device__ __forceinline__ void fill(const Groups& groups, const group_tile& own) {
    const int lane = threadIdx.x % 32;
    u32* const table = tables_ + state_.index * words;
    state_.wait_empty();
    if (own.count > 0) {
      if (own.first != next_ || own.rank == 0) cursor_ = groups.locate(own.group, own.rank);
      cursor_ = groups.list(own.group, own.rank, own.count, cursor_, table);
      next_ = own.first + own.count;
      __syncwarp();
      // Padding rows repeat the tile's last row, which is stored only once.
      const u32 last = table[own.count - 1];
      for (int row = own.count + lane; row < all; row += 32) table[row] = last;
    }
    if (lane < tiles) {
      u32 word = 0;
      const int left = smaller(own.count - lane * height, height);
      if (left > 0) {
        const u32 first = table[lane * height], last = table[lane * height + left - 1];
        word = last - first == static_cast<u32>(left - 1) ? first : first | tile_rows::scattered;
        if constexpr (Groups::rows_may_repeat) {
          for (int i = 1; i < left && word == first; ++i) {
            if (table[lane * height + i] != first + i) word = first | tile_rows::scattered;
          }
        }
      }
      table[all + lane] = word;
    }
    barrier_arrive(state_.full_barrier());
    advance();
  }
  __device__ __forceinline__ tile_rows wait(int tile = 0) const {
    state_.wait_full();
    const u32* const table = tables_ + state_.index * words;
    return {table[all + tile], table + tile * height};
  }
  // Releases a stage whose rows are not needed.
  __device__ __forceinline__ tile_rows unread() const { return {0, tables_}; }
  // All lanes of a warp.
  __device__ __forceinline__ void release() const { barrier_arrive(state_.empty_barrier()); }
};

template <class Traits>
using row_indices_of =
    typename choose_type<Traits::reduction,
                         row_index_pipeline<sm90_reduction_tokens, sm90_reduction_lookahead>,
                         row_index_pipeline<Traits::config.bm>>::type;

// --- Split-K ---
//
// The CTAs of a cluster that share the k of a tile add up their accumulators through distributed
// shared memory, in the order of the CTAs, so that the bits are the same every time. Accumulators
// go into shared memory of the CTA that reduces them, whose barrier counts the bytes: no CTA waits
// for another but for these.

// The accumulators of an MMA thread.
template <class Traits>
using accumulators_of =
    float[Traits::plan.m64_tiles][Traits::form.b_operands()][Traits::plan.accumulators];

// Every CTA has all k of its tiles.
struct no_split_k {
  // One thread, at the start.
  static __device__ __forceinline__ void init(u32, u32) {}
  // The first of the columns of the MMAs that the CTA finishes.
  static __device__ __forceinline__ int first_column(u32) { return 0; }
};

// Each reducer finishes a share of the columns. `buffers` and `arrived` are the plan's reduction_at
// and reduction_barrier_at.
template <class Traits>
struct split_k_reduction {
  static constexpr sm90_config config = Traits::config;
  static constexpr sm90_plan plan = Traits::plan;
  static constexpr int b_operands = Traits::form.b_operands(), m64_tiles = plan.m64_tiles;
  static constexpr int values = plan.accumulators, reduced = plan.reduced_columns / 2;
  using accumulators = accumulators_of<Traits>;
  using fragment = float[m64_tiles][b_operands][reduced];  // what a thread finishes
  static constexpr u32 threads = config.mma_warpgroups * 128;

  u32 buffers, arrived, rank;

  static __device__ __forceinline__ void init(u32 base, u32 rank) {
    barrier_init(base + plan.reduction_barrier_at, 1);
    if (rank < plan.reducers) {
      barrier_arrive_expect(base + plan.reduction_barrier_at, plan.reduction_bytes);
    }
  }
  static __device__ __forceinline__ int first_column(u32 rank) {
    return static_cast<int>(rank) * plan.reduced_columns;
  }

  // `total` may be `mine`, where one CTA finishes all columns.
  __device__ __forceinline__ void reduce(const accumulators& mine, fragment& total) const {
    constexpr int vectors = b_operands * m64_tiles * reduced / 4;
    const u32 thread = threadIdx.x;
    cluster_wait();  // the other CTAs have started, and their barriers are there
#pragma unroll
    for (int reducer = 0; reducer < plan.reducers; ++reducer) {
      if (reducer == static_cast<int>(rank)) continue;
      const u32 from = rank < reducer ? rank : rank - 1;  // a reducer has no buffer for itself
      const u32 to = cluster_address(buffers, reducer) + (from * vectors * threads + thread) * 16;
      const u32 barrier = cluster_address(arrived, reducer);
#pragma unroll
      for (int vector = 0; vector < vectors; ++vector) {
        const float* value =
            &mine[vector / (b_operands * reduced / 4)][vector / (reduced / 4) % b_operands]
                 [reducer * reduced + vector % (reduced / 4) * 4];
        store_cluster_async(to + vector * threads * 16,
                            make_float4(value[0], value[1], value[2], value[3]), barrier);
      }
    }
    if (rank >= plan.reducers) return;
    const u32 self = plan.reducers == 1 ? 0 : rank;
    barrier_wait(arrived, 0);
#pragma unroll
    for (int vector = 0; vector < vectors; ++vector) {
      const int m64 = vector / (b_operands * reduced / 4);
      const int operand = vector / (reduced / 4) % b_operands;
      const int at = vector % (reduced / 4) * 4;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int cta = 0; cta < config.split_k; ++cta) {
        float4 term;
        if (cta == static_cast<int>(self)) {
          term = own(mine[m64][operand], at);
        } else {
          const u32 from = cta < static_cast<int>(self) ? cta : cta - 1;
          term = load_shared(buffers + ((from * vectors + vector) * threads + thread) * 16);
        }
        sum = make_float4(sum.x + term.x, sum.y + term.y, sum.z + term.z, sum.w + term.w);
      }
      total[m64][operand][at] = sum.x;
      total[m64][operand][at + 1] = sum.y;
      total[m64][operand][at + 2] = sum.z;
      total[m64][operand][at + 3] = sum.w;
    }
  }

 private:
  // This CTA's own accumulators of the columns that it finishes; a register array takes no index
  // known only at run time.
  __device__ __forceinline__ float4 own(const float (&mine)[values], int at) const {
    float4 value = make_float4(mine[at], mine[at + 1], mine[at + 2], mine[at + 3]);
#pragma unroll
    for (int reducer = 1; reducer < plan.reducers; ++reducer) {
      if (reducer == static_cast<int>(rank)) {
        const float* from = &mine[reducer * reduced + at];
        value = make_float4(from[0], from[1], from[2], from[3]);
      }
    }
    return value;
  }
};

// Split-K reduction of a grouped reduction: one CTA finishes a tile, and the others send it their
// accumulators, most often while it is still busy with its own K blocks.
template <class Traits>
struct single_cta_reduction {
  static constexpr int count =
      Traits::plan.m64_tiles * Traits::form.b_operands() * Traits::plan.accumulators;
  static constexpr u32 threads = Traits::config.mma_warpgroups * 128;
  static_assert(count % 4 == 0);
  static constexpr int vectors = count / 4, bytes = count * threads * 4;
  using accumulators = accumulators_of<Traits>;

  u32 buffers, arrived, rank;

  static __device__ __forceinline__ void init(u32 base, u32) {
    barrier_init(base + Traits::plan.reduction_barrier_at, 1);
  }
  static __device__ __forceinline__ int first_column(u32) { return 0; }

  __device__ __forceinline__ void send(const accumulators& acc, u32 reducer) const {
    const float* const mine = reinterpret_cast<const float*>(acc);
    const u32 to = cluster_address(buffers, reducer) + place_of(rank, reducer);
    const u32 barrier = cluster_address(arrived, reducer);
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      store_cluster_async(
          to + i * threads * 16,
          make_float4(mine[i * 4], mine[i * 4 + 1], mine[i * 4 + 2], mine[i * 4 + 3]), barrier);
    }
  }

  // Adds those of the CTAs whose bit is set in `senders`, in their order, when they have come. All
  // threads, once a kernel.
  __device__ __forceinline__ void receive(accumulators& acc, u32 senders) const {
    float* const mine = reinterpret_cast<float*>(acc);
    if (senders == 0) return;
    if (threadIdx.x == 0) barrier_arrive_expect(arrived, __popc(senders) * bytes);
    barrier_wait(arrived, 0);
#pragma unroll 1
    for (; senders != 0; senders &= senders - 1) {
      const u32 from = buffers + place_of(__ffs(senders) - 1, rank);
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        const float4 term = load_shared(from + i * threads * 16);
        mine[i * 4] += term.x;
        mine[i * 4 + 1] += term.y;
        mine[i * 4 + 2] += term.z;
        mine[i * 4 + 3] += term.w;
      }
    }
  }

 private:
  // Where a CTA's accumulators go beside those of the others; the reducer has no place for itself.
  static __device__ __forceinline__ u32 place_of(u32 cta, u32 reducer) {
    return (cta < reducer ? cta : cta - 1) * bytes + threadIdx.x * 16;
  }
};

template <class Traits>
using split_k_of =
    typename choose_type<!Traits::splits_k, no_split_k,
                         typename choose_type<Traits::reduction, single_cta_reduction<Traits>,
                                              split_k_reduction<Traits>>::type>::type;

}  // namespace fftune
