// The shared-memory pipelines of the sm_90a GEMM: of K blocks, from the producer warps to the MMA
// warpgroups, and of gathered row indices, from the index warp to those who load and store the
// rows.
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

}  // namespace fftune
