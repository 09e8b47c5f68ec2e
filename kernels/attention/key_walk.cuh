// The key blocks of a work tile, in the order in which the producer loads them and the MMA
// warpgroups use them.
//
// Without a packed mask they go from the last to the first. Under a causal mask, and at a ragged
// end, the blocks that need an element mask come first, then full ones, then with a window the
// masked ones at the beginning. With a packed mask they go upwards over those whose flags are not
// empty, which a warp reads 32 at a time.
#pragma once

#include "attention/tile_scheduler.cuh"

namespace fftune {

// `rows`: of the work tile, which decide which blocks there are; `own_rows` from `own_first` on, of
// the asking MMA warpgroup, decide which of these need an element mask. All lanes of a warp.
template <attention_form form, int rows, int own_rows, int bn>
class key_walk {
  static constexpr bool packed = form.mask == attention_mask::packed;
  int first_, block_;
  int full_first_, full_last_;  // blocks that the asking warpgroup's rows see all of
  int own_last_;                // the one after the last that they see some of
  // Packed: of 32 blocks from base_ on, those that hold keys, and those without a mixed tile.
  struct flag_words {
    u32 present, full;
    int base, last;
  };
  struct no_flags {};
  typename choose_type<packed, flag_words, no_flags>::type words_;

 public:
  __device__ __forceinline__ key_walk(const attention_params& params, const attention_tile& tile,
                                      int own_first) {
    const key_blocks all = key_blocks_of<form, bn>(params, tile.sequence, tile.first_row,
                                                   tile.last_row(tile.first_row, rows));
    const int own_row = tile.first_row + own_first;
    const key_blocks own =
        key_blocks_of<form, bn>(params, tile.sequence, own_row, tile.last_row(own_row, own_rows));
    first_ = all.first;
    full_first_ = own.full_first;
    full_last_ = own.full_last;
    own_last_ = own.last;
    if constexpr (packed) {
      words_.base = first_ - 32;
      words_.last = all.last;
      words_.present = 0;
      load_flags(params, tile, own_row);
    } else {
      block_ = all.last - 1;
    }
  }

  __device__ __forceinline__ bool is_valid() const {
    if constexpr (packed) return words_.present != 0;
    return block_ >= first_;
  }
  __device__ __forceinline__ int block() const { return block_; }
  // The last one of a walk without a packed mask.
  __device__ __forceinline__ int lowest() const { return first_; }
  // How many blocks from this one on the asking warpgroup's rows see nothing of. One that is left
  // is not counted: every warpgroup has a block.
  __device__ __forceinline__ int unseen() const {
    if constexpr (packed || form.mask != attention_mask::causal) return 0;
    return larger(0, smaller(block_ - own_last_ + 1, block_ - first_));
  }
  __device__ __forceinline__ bool masked() const {
    const bool full = block_ >= full_first_ && block_ < full_last_;
    if constexpr (packed) return !full || (words_.full >> (block_ - words_.base) & 1) == 0;
    return !full;
  }

  // Without a packed mask: leaves the blocks of [first, last).
  __device__ __forceinline__ void keep(int first, int last) {
    static_assert(!packed);
    first_ = larger(first_, first);
    block_ = smaller(block_, last - 1);
  }
  // Without a packed mask: begins at invisible blocks past the last, so that there is a multiple of
  // `count`; if there is no block at all, none is added.
  __device__ __forceinline__ void round_up(int count) {
    static_assert(!packed);
    const int over = larger(0, block_ - first_ + 1) % count;
    if (over != 0) block_ += count - over;
  }
  __device__ __forceinline__ void skip(int count) {
    static_assert(!packed);
    block_ -= count;
  }

  __device__ __forceinline__ void next(const attention_params& params, const attention_tile& tile,
                                       int own_first) {
    if constexpr (packed) {
      words_.present &= words_.present - 1;
      load_flags(params, tile, tile.first_row + own_first);
    } else {
      --block_;
    }
  }

 private:
  __device__ __forceinline__ void load_flags(const attention_params& params,
                                             const attention_tile& tile, int own_row) {
    while (words_.present == 0) {
      words_.base += 32;
      if (words_.base >= words_.last) return;
      const packed_mask mask(params, tile.sequence.index, tile.head);
      const int block = words_.base + static_cast<int>(threadIdx.x % 32);
      bool any = false, full = false;
      if (block < words_.last) {
        any = mask.flag<rows, bn>(tile.first_row, block * bn) != tile_empty;
        full = mask.flag<own_rows, bn>(own_row, block * bn) == tile_full;
      }
      words_.present = __ballot_sync(~0u, any);
      words_.full = __ballot_sync(~0u, full);
    }
    block_ = words_.base + __ffs(static_cast<int>(words_.present)) - 1;
  }
};

}  // namespace fftune
