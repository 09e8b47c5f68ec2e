// Where the tokens of two groups are, 64 at a time: a table that one kernel writes, which knows the
// mask, and later ones read.
#pragma once

#include "gemm/grouped_tiles.cuh"

namespace fftune {

class token_tiles {
  const u32* table_;  // tokens of the first group, then the place of each tile
  int all_;

 public:
  static constexpr int height = 64;
  // The place of a tile whose tokens are no neighbours; else it is its first token.
  static constexpr u32 scattered = 0x80000000;
  using tiles = grouped_tiles<height, 1>;

  // Words of the table. Behind the last tile it has the place of one without tokens.
  static __host__ __device__ constexpr u32 words(u32 tokens) {
    return 2 + ceil_div(tokens, static_cast<u32>(height)) + 1;
  }

  // One thread: how many tokens are of the first group, and the place of a tile.
  static __device__ __forceinline__ void write_marked(int marked, u32* table) { table[0] = marked; }
  static __device__ __forceinline__ void write_place(u32 tile, u32 place, u32* table) {
    table[1 + tile] = place;
  }
  // All `threads` threads of a block; `shared` has room for the table.
  static __device__ __forceinline__ token_tiles load(const u32* table, int tokens, u32* shared,
                                                     u32 threads) {
    for (u32 i = threadIdx.x; i < words(tokens); i += threads) shared[i] = table[i];
    __syncthreads();
    token_tiles result;
    result.table_ = shared;
    result.all_ = tokens;
    return result;
  }

  __device__ __forceinline__ int marked() const { return static_cast<int>(table_[0]); }
  // Tokens of a group, and the place of the first in the order of the groups.
  __device__ __forceinline__ int count(int group) const {
    return group == 0 ? marked() : all_ - marked();
  }
  __device__ __forceinline__ int begin(int group) const { return group == 0 ? 0 : marked(); }
  // Of tile `index` of a group, or of one past its last.
  __device__ __forceinline__ u32 place(int group, int index) const {
    return table_[1 + (group == 0 ? 0 : ceil_div(marked(), height)) + index];
  }
};

}  // namespace fftune
