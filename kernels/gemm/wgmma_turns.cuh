// Tiles of the same gathered rows that a block of the wgmma engine has in turn.
//
// cp.async takes a cycle of shared memory for every 32 bytes, TMA one for 128, and wide tiles leave
// few cycles. So a block takes `turns` tiles side by side along n one after the other: the first
// one's rows are gathered, and as k tiles arrive a consumer stores them as they lie in the slot;
// for the others TMA copies them from there.
#pragma once

#include "gemm/wgmma_ring.cuh"

namespace fftune {

// The schedule of the engine over `turns` tiles along n as one.
template <wgmma_tile tile, int turns>
class wgmma_turns : wgmma_schedule<tile> {
  using wide = wgmma_schedule<tile>;
  static_assert(turns == 1 || (wide::blocks == 1 && !tile.ping_pong));
  u32 columns_, turn_ = 0;

  static __device__ __forceinline__ int columns_of(const wgmma_gemm_shape& shape) {
    return ceil_div(shape.n, tile.bn);
  }
  static __device__ __forceinline__ wgmma_gemm_shape wide_shape(const wgmma_gemm_shape& shape) {
    if constexpr (turns == 1) return shape;
    return {shape.m, ceil_div(columns_of(shape), turns) * tile.bn, shape.k, shape.group_m};
  }

 public:
  __device__ __forceinline__ wgmma_turns(const wgmma_gemm_shape& shape)
      : wide(wide_shape(shape)), columns_(columns_of(shape)) {}

  using wide::pending;
  __device__ __forceinline__ tile_position position(u32 rank) const {
    tile_position at = wide::position(rank);
    if constexpr (turns > 1) at.n = at.n * turns + turn_;
    return at;
  }
  // Whether the tile is the first or the last of its rows here.
  __device__ __forceinline__ bool first() const { return turn_ == 0; }
  __device__ __forceinline__ bool last() const {
    return turns == 1 || turn_ + 1 == turns || position(0).n + 1 >= columns_;
  }
  // To the next tile, past `tiles - 1` others, which are of other rows.
  __device__ __forceinline__ void advance(u32 tiles) {
    if (last()) {
      turn_ = 0;
      wide::advance(tiles);
    } else {
      ++turn_;
    }
  }
  // To the next tile of other rows.
  __device__ __forceinline__ void advance_rows() {
    turn_ = 0;
    wide::advance(1);
  }
};

// The last few k tiles of a row of tiles, whose stores nobody waits for in its main loop.
constexpr int wgmma_kept_late = 3;

// Barriers that say of a row of tiles that all but its last wgmma_kept_late k tiles are there to be
// loaded, and that all are. Each is waited for once for each row that is kept, or the next could
// answer in its place.
struct wgmma_kept_barriers {
  static constexpr int bytes = 16;
  u32 most;

  __device__ __forceinline__ u32 all() const { return most + 8; }
  __device__ __forceinline__ void init() const {
    barrier_init(most, 1);
    barrier_init(all(), 1);
  }
  // Before `k_tile` of the second turn is loaded; `parity`: of the number of rows kept before.
  __device__ __forceinline__ void wait(int k_tile, int k_tiles, u32 parity) const {
    const int first_late = larger(k_tiles - wgmma_kept_late, 0);
    if (k_tile != 0 && k_tile != first_late) return;
    if (k_tile == 0) barrier_wait(most, parity);
    if (k_tile == first_late) barrier_wait(all(), parity);
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }
};

// What one thread of the consumers does with the k tiles of a row of tiles. Row of tiles number i
// lies in rows [i tile.bm, (i + 1) tile.bm) of `map`; blocks that have the same rows keep the same
// bits there.
struct wgmma_keeper {
  const tensor_map& map;
  int row;
  bool keeps;  // and this is the thread

  __device__ __forceinline__ void store(u32 slot, int k) const {
    if (!keeps) return;
    tma_store(map, slot, k, row);
    tma_store_commit();
  }
  // All but the last `pending` slots may be filled again.
  template <int pending>
  __device__ __forceinline__ void wait_read() const {
    if (keeps) tma_store_wait_read<pending>();
  }
  // Arrives when all but the last `pending` groups of this thread's stores are complete.
  template <int pending>
  __device__ __forceinline__ void arrive(u32 barrier) const {
    if (!keeps) return;
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
    barrier_arrive(barrier);
  }
};

}  // namespace fftune
