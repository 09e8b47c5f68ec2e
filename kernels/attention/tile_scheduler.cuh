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
// sequences further at a time. With packed heads, sequences of one tile (decoding) are spread
// evenly among the tiles of longer ones (prompts): the first wait for memory, the others compute.
#pragma once

#include "attention/mask.cuh"

namespace fftune {

struct attention_tile {
  attention_sequence sequence;
  int head;       // of q; with packed heads of k and v
  int first_row;  // of the sequence

  // The existing rows among the 64 of an MMA warpgroup.
  __device__ __forceinline__ int last_row(int first, int rows) const {
    return larger(first + 1, smaller(first + rows, sequence.q_len));
  }
};

template <attention_form form, int bm, int ctas_per_sm, int packed_heads = 1>
class attention_tile_scheduler {
  static constexpr bool spreads = form.packed_sequences() && packed_heads > 1;
  enum class sequences { all, of_one_tile, of_more };
  // thd: the sequence that lane 0 looks at, and the tiles before it.
  struct cursor {
    int first_sequence = 0, tiles_before = 0;
  };
  struct lane_tiles {
    int own, up_to;  // rows of tiles of a lane's sequence; tiles of the lanes up to it
  };

  const attention_params& params_;
  int round_ = 0;
  int index_;
  cursor cursor_, short_cursor_;
  int short_tiles_ = 0, long_tiles_ = 0;  // spreads
  bool is_valid_ = true;
  attention_tile tile_ = {};

 public:
  __device__ __forceinline__ explicit attention_tile_scheduler(const attention_params& params)
      : params_(params), index_(first()) {
    if constexpr (spreads) count_tiles();
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
    if constexpr (spreads) return short_tiles_ + long_tiles_;
    if constexpr (form.packed_sequences()) return cursor_.tiles_before;
    return ceil_div(params_.q_len, bm) * params_.batch * heads();
  }

 private:
  // Heads that have tiles.
  __device__ __forceinline__ int heads() const { return params_.heads / packed_heads; }

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
      find_packed();
    } else {
      const int tiles = ceil_div(params_.q_len, bm);
      const int matrices = params_.batch * heads();
      is_valid_ = index_ < tiles * matrices;
      if (!is_valid_) return;
      const int matrix = place(index_, tiles, matrices, tile_.first_row);
      const int sequence = matrix / heads();
      tile_.head = matrix - sequence * heads();
      tile_.sequence = sequence_of<form>(params_, sequence);
    }
  }

  // Sequences that overlap, as no offsets should have them, could make more tiles than a number
  // counts.
  __device__ __forceinline__ int most_tiles() const {
    return (ceil_div(params_.q_len, bm) + params_.batch) * heads();
  }

  // The tiles of 32 sequences. All lanes of a warp.
  __device__ __forceinline__ lane_tiles look(int first_sequence, sequences which) const {
    const int lane = static_cast<int>(threadIdx.x % 32), own = first_sequence + lane;
    int tiles = 0;
    if (own < params_.batch) tiles = ceil_div(sequence_of<form>(params_, own).q_len, bm);
    if (which != sequences::all && (tiles > 1) != (which == sequences::of_more)) tiles = 0;
    int up_to = tiles * heads();
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, up_to, step);
      if (lane >= step) up_to += other;
    }
    return {tiles, up_to};
  }

  __device__ __forceinline__ void count_tiles() {
    const int most = most_tiles();
    for (int first = 0; first < params_.batch; first += 32) {
      short_tiles_ += __shfl_sync(~0u, look(first, sequences::of_one_tile).up_to, 31);
      const int more = __shfl_sync(~0u, look(first, sequences::of_more).up_to, 31);
      long_tiles_ = smaller(most, long_tiles_ + more);
    }
    long_tiles_ = smaller(long_tiles_, most - short_tiles_);
  }

  __device__ __forceinline__ void find_packed() {
    if constexpr (spreads) {
      const int all = count();
      is_valid_ = index_ < all;
      if (!is_valid_) return;
      const auto short_before = [&](int index) {
        return static_cast<int>(static_cast<u64>(index) * static_cast<u64>(short_tiles_) /
                                static_cast<u64>(all));
      };
      const int before = short_before(index_);
      if (short_before(index_ + 1) > before) {
        find_sequence(short_cursor_, before, sequences::of_one_tile);
      } else {
        find_sequence(cursor_, index_ - before, sequences::of_more);
      }
    } else {
      const int most = most_tiles();
      if (index_ < most) {
        find_sequence(cursor_, index_, sequences::all);
      } else {
        cursor_.tiles_before = most;
        is_valid_ = false;
      }
    }
  }

  // All lanes of a warp. Indices only grow.
  __device__ __forceinline__ void find_sequence(cursor& at, int index, sequences which) {
    for (; at.first_sequence < params_.batch; at.first_sequence += 32) {
      const lane_tiles tiles = look(at.first_sequence, which);
      const int wanted = index - at.tiles_before;
      const u32 beyond = __ballot_sync(~0u, tiles.up_to > wanted);
      if (beyond != 0) {
        const int which_lane = __ffs(static_cast<int>(beyond)) - 1;
        const int found_tiles = __shfl_sync(~0u, tiles.own, which_lane);
        const int found_up_to = __shfl_sync(~0u, tiles.up_to, which_lane);
        const int in_sequence = wanted - (found_up_to - found_tiles * heads());
        tile_.head = place(in_sequence, found_tiles, heads(), tile_.first_row);
        tile_.sequence = sequence_of<form>(params_, at.first_sequence + which_lane);
        return;
      }
      at.tiles_before += __shfl_sync(~0u, tiles.up_to, 31);
    }
    is_valid_ = false;
  }
};

}  // namespace fftune
