// The tile scheduler of the attention forward kernels: the tiles of queries of all sequences and
// heads, in the same order for every warp that asks.
//
// Tiles of `group` heads whose keys and values fit in L2 together are in succession, those with
// the last rows first: under a causal mask they take longest. In fixed turns (next) every other
// round over the grid goes backwards, since the first of a round take longer than the last. A CTA
// that asks a counter instead names the tile (take). A grid with a CTA for each tile needs one
// round, and the hardware balances.
//
// In thd the number of tiles of a sequence is known on the device alone: each warp looks 32
// sequences further at a time.
#pragma once

#include "attention/mask.cuh"

namespace fftune {

struct attention_tile {
  attention_sequence sequence;
  int head;
  int first_row;  // of the sequence

  // The existing rows among the 64 of an MMA warpgroup.
  __device__ __forceinline__ int last_row(int first, int rows) const {
    return larger(first + 1, smaller(first + rows, sequence.q_len));
  }
};

template <attention_form form, int bm, int ctas_per_sm>
class attention_tile_scheduler {
  const attention_params& params_;
  int round_ = 0;
  int index_;
  // thd: the sequence that lane 0 looks at, and the tiles before it.
  int first_sequence_ = 0, tiles_before_ = 0;
  bool is_valid_ = true;
  attention_tile tile_ = {};

 public:
  __device__ __forceinline__ explicit attention_tile_scheduler(const attention_params& params)
      : params_(params), index_(first()) {
    find();
  }

  __device__ __forceinline__ bool is_valid() const { return is_valid_; }
  __device__ __forceinline__ const attention_tile& tile() const { return tile_; }

  __device__ __forceinline__ void next() {
    ++round_;
    const int grid = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    index_ = round_ * grid + (round_ % 2 == 0 ? block : grid - 1 - block);
    find();
  }
  // Indices must grow.
  __device__ __forceinline__ void take(int index) {
    index_ = index;
    find();
  }
  // All tiles; when none is left.
  __device__ __forceinline__ int count() const {
    if constexpr (form.packed_sequences()) return tiles_before_;
    return ceil_div(params_.q_len, bm) * params_.batch * params_.heads;
  }

 private:
  // CTAs are placed one on each SM, then a second on each: the first half has the long tiles in
  // order, the second half what is left in reverse. A larger grid is not on the SMs all at once.
  static __device__ __forceinline__ int first() {
    const int grid = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    if constexpr (ctas_per_sm == 2) {
      int multiprocessors;
      asm("mov.u32 %0, %%nsmid;" : "=r"(multiprocessors));
      const int half = grid / 2;
      if (grid <= 2 * multiprocessors && block >= half) return half + grid - 1 - block;
    }
    return block;
  }

  // The head, and first row, of tile `index` among `tiles` row tiles of each of `matrices` heads.
  __device__ __forceinline__ int place(int index, int tiles, int matrices, int& first_row) const {
    const int in_group = params_.group * tiles;
    const int group = index / in_group;
    const int first = group * params_.group;
    const int heads = smaller(params_.group, matrices - first);
    const int rest = index - group * in_group;
    const int row = rest / heads;
    first_row = (tiles - 1 - row) * bm;
    return first + rest - row * heads;
  }

  __device__ __forceinline__ void find() {
    if constexpr (form.packed_sequences()) {
      find_sequence();
    } else {
      const int tiles = ceil_div(params_.q_len, bm);
      const int matrices = params_.batch * params_.heads;
      is_valid_ = index_ < tiles * matrices;
      if (!is_valid_) return;
      const int matrix = place(index_, tiles, matrices, tile_.first_row);
      const int sequence = matrix / params_.heads;
      tile_.head = matrix - sequence * params_.heads;
      tile_.sequence = sequence_of<form>(params_, sequence);
    }
  }

  // All lanes of a warp. Indices only grow.
  __device__ __forceinline__ void find_sequence() {
    const int lane = static_cast<int>(threadIdx.x % 32);
    // Sequences that overlap, as no offsets should have them, could make more tiles than a number
    // counts.
    const int most = (ceil_div(params_.q_len, bm) + params_.batch) * params_.heads;
    if (index_ >= most) {
      tiles_before_ = most;
      is_valid_ = false;
      return;
    }
    for (; first_sequence_ < params_.batch; first_sequence_ += 32) {
      const int own = first_sequence_ + lane;
      int tiles = 0;
      if (own < params_.batch) tiles = ceil_div(sequence_of<form>(params_, own).q_len, bm);
      int up_to = tiles * params_.heads;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, up_to, step);
        if (lane >= step) up_to += other;
      }
      const int wanted = index_ - tiles_before_;
      const u32 beyond = __ballot_sync(~0u, up_to > wanted);
      if (beyond != 0) {
        const int which = __ffs(static_cast<int>(beyond)) - 1;
        const int found_tiles = __shfl_sync(~0u, tiles, which);
        const int found_up_to = __shfl_sync(~0u, up_to, which);
        const int in_sequence = wanted - (found_up_to - found_tiles * params_.heads);
        tile_.head = place(in_sequence, found_tiles, params_.heads, tile_.first_row);
        tile_.sequence = sequence_of<form>(params_, first_sequence_ + which);
        return;
      }
      tiles_before_ += __shfl_sync(~0u, up_to, 31);
    }
    is_valid_ = false;
  }
};

}  // namespace fftune
