// Which rows the tiles of a schedule have, from the warp that finds it out to those who copy and
// store the rows: through shared memory, a tile ahead of them.
#pragma once

#include "gemm/grouped_tiles.cuh"
#include "gemm/wgmma_ring.cuh"

namespace fftune {

// The rows of a tile.
struct tile_rows {
  static constexpr u32 scattered = 0x80000000;
  u32 word;         // the first of them, and whether they are no neighbours
  const u32* rows;  // in shared memory

  __device__ __forceinline__ bool consecutive() const { return (word & scattered) == 0; }
  __device__ __forceinline__ int first() const { return static_cast<int>(word & ~scattered); }
};

// Two tables, so that the rows of a tile are found while those of the one before are in use. Like
// the ring of k tiles each has a barrier that says full and one that says empty. A table may have
// the rows of several tiles that follow each other in their group.
template <int height, int tiles = 1>
class row_tables {
  static_assert(tiles <= 4);
  static constexpr int all = height * tiles, words = all + 4;
  wgmma_ring<2, words * 4> place_;
  u32* tables_;
  // Where the rows that follow the last ones found may be looked for.
  int next_ = -1;
  u32 chunk_ = 0;

 public:
  // Rows of a table; bytes of shared memory for both, a multiple of 16.
  static constexpr int rows = all, bytes = 2 * words * 4 + 4 * 8;

  // `memory` is `shared` as an address.
  __device__ __forceinline__ row_tables(unsigned char* memory, u32 shared)
      : place_{shared, shared + 2 * words * 4, shared + 2 * words * 4 + 16},
        tables_(reinterpret_cast<u32*>(memory)) {}

  // One thread; `releases` warps release each table.
  __device__ __forceinline__ void init(u32 releases) const {
    for (int i = 0; i < 2; ++i) {
      barrier_init(place_.full + i * 8, 32);
      barrier_init(place_.empty + i * 8, 32 * releases);
    }
  }

  __device__ __forceinline__ void advance() { place_.advance(); }
  __device__ __forceinline__ void skip(u32 count) { place_.skip(count); }

  // The rows of the next table. All lanes of a warp.
  __device__ __forceinline__ void fill(const row_groups& groups, const grouped_place& own) {
    const int lane = threadIdx.x % 32;
    u32* const table = tables_ + place_.index * words;
    barrier_wait(place_.empty_barrier(), place_.parity ^ 1);
    if (own.count > 0) {
      if (own.first != next_ || own.rank == 0) chunk_ = groups.chunk_of(own.group, own.rank);
      chunk_ = groups.list(own.group, own.rank, own.count, chunk_, table);
      next_ = own.first + own.count;
      __syncwarp();
      // What is no row of a tile takes part as its last one, which nobody stores twice.
      const u32 last = table[own.count - 1];
      for (int row = own.count + lane; row < all; row += 32) table[row] = last;
    }
    if (lane < tiles) {
      u32 word = 0;
      const int left = smaller(own.count - lane * height, height);
      if (left > 0) {
        const u32 first = table[lane * height], last = table[lane * height + left - 1];
        word = last - first == static_cast<u32>(left - 1) ? first : first | tile_rows::scattered;
      }
      table[all + lane] = word;
    }
    barrier_arrive(place_.full_barrier());
    advance();
  }
  __device__ __forceinline__ tile_rows wait(int tile = 0) const {
    barrier_wait(place_.full_barrier(), place_.parity);
    const u32* const table = tables_ + place_.index * words;
    return {table[all + tile], table + tile * height};
  }
  // A table whose rows nobody looks at.
  __device__ __forceinline__ tile_rows unread() const { return {0, tables_}; }
  // All lanes of a warp.
  __device__ __forceinline__ void release() const { barrier_arrive(place_.empty_barrier()); }
};

}  // namespace fftune
