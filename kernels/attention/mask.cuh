// Which keys a query sees: of a tile of queries, which blocks of keys hold none, some, or only keys
// that all of its rows see; and, inside a block that holds some, which of its elements.
//
// Rows and keys are counted from the beginning of their sequence. With shift = kv_len - q_len, row
// i sees the keys j of [0, kv_len) with
//   j <= i + shift             causal
//   j > i + shift - window     window
//   bit j of row i is set      packed
#pragma once

#include "attention/form.cuh"
#include "attention/params.cuh"
#include "common/types.cuh"

namespace fftune {

// One sequence of the batch.
struct attention_sequence {
  int index;
  int q_first, q_len;  // its first row of q in the tensor (thd; else of the sequence: 0), its rows
  int kv_first, kv_len;  // the same of k and v

  __device__ __forceinline__ int shift() const { return kv_len - q_len; }
};

// An offset from memory, cut to [least, most]: whatever it is, no row is outside the tensors.
__device__ __forceinline__ int bounded(int value, int least, int most) {
  return larger(least, smaller(value, most));
}

template <attention_form form>
__device__ __forceinline__ attention_sequence sequence_of(const attention_params& params,
                                                          int index) {
  attention_sequence sequence{index, 0, params.q_len, 0, params.kv_len};
  if constexpr (form.packed_sequences()) {
    const auto cut = [index](const int* offsets, int tokens, int& first, int& count) {
      first = bounded(offsets[index], 0, tokens);
      count = bounded(offsets[index + 1], first, tokens) - first;
    };
    cut(params.offsets, params.q_len, sequence.q_first, sequence.q_len);
    if constexpr (!form.paged) {
      cut(params.kv_offsets, params.kv_len, sequence.kv_first, sequence.kv_len);
    }
  }
  if constexpr (form.lengths) {
    sequence.kv_len = smaller(sequence.kv_len, larger(params.lengths[index], 0));
  }
  return sequence;
}

// The pages of a sequence.
__device__ __forceinline__ const int* page_table(const attention_params& params, int sequence) {
  return params.pages + static_cast<i64>(sequence) * ceil_div(params.kv_len, params.page);
}
// Whether the cache has a page that a table names. Keys and values of others are zeros.
__device__ __forceinline__ bool has_page(const attention_params& params, int page) {
  return static_cast<u32>(page) < static_cast<u32>(params.page_count);
}

// Keys [first, last).
struct key_range {
  int first, last;
};

// The keys that some row of [first_row, last_row) may see, whatever bits say.
template <attention_form form>
__device__ __forceinline__ key_range visible_keys(const attention_params& params,
                                                  const attention_sequence& sequence, int first_row,
                                                  int last_row) {
  key_range keys{0, sequence.kv_len};
  if constexpr (form.mask == attention_mask::causal) {
    keys.last = larger(0, smaller(keys.last, last_row + sequence.shift()));
  }
  if constexpr (form.window) {
    keys.first = larger(0, first_row + sequence.shift() - params.window + 1);
  }
  return keys;
}

// The keys that every row of [first_row, last_row) sees, if bits allow it; none if last <= first.
template <attention_form form>
__device__ __forceinline__ key_range common_keys(const attention_params& params,
                                                 const attention_sequence& sequence, int first_row,
                                                 int last_row) {
  key_range keys{0, sequence.kv_len};
  if constexpr (form.mask == attention_mask::causal) {
    keys.last = smaller(keys.last, first_row + 1 + sequence.shift());
  }
  if constexpr (form.window) {
    keys.first = larger(0, last_row + sequence.shift() - params.window);
  }
  return keys;
}

// The key blocks of a tile of queries: [first, last) hold visible keys, [full_first, full_last)
// among them need no element mask. If none is visible first == last.
struct key_blocks {
  int first, full_first, full_last, last;
  __device__ __forceinline__ int count() const { return last - first; }
};

template <attention_form form, int bn>
__device__ __forceinline__ key_blocks key_blocks_of(const attention_params& params,
                                                    const attention_sequence& sequence,
                                                    int first_row, int last_row) {
  const key_range visible = visible_keys<form>(params, sequence, first_row, last_row);
  const key_range common = common_keys<form>(params, sequence, first_row, last_row);
  key_blocks blocks;
  blocks.first = visible.first / bn;
  blocks.last = larger(blocks.first, ceil_div(visible.last, bn));
  blocks.full_first = smaller(blocks.last, larger(blocks.first, ceil_div(common.first, bn)));
  blocks.full_last = smaller(blocks.last, larger(blocks.full_first, larger(common.last, 0) / bn));
  return blocks;
}

// The keys of one row, whatever bits say: none if last <= first.
template <attention_form form>
__device__ __forceinline__ key_range keys_of_row(const attention_params& params,
                                                 const attention_sequence& sequence, int row) {
  return visible_keys<form>(params, sequence, row, row + 1);
}

// A packed mask, of one sequence and head.
struct packed_mask {
  const u32* bits;
  const u8* flags;
  int words;       // of a row of bits
  int flags_row;   // flags of a row of tiles
  int flags_rows;  // rows of tiles

  __device__ __forceinline__ packed_mask(const attention_params& params, int sequence, int head)
      : words(attention_mask_words(params.kv_len)),
        flags_row(ceil_div(params.kv_len, attention_flag_tile)),
        flags_rows(ceil_div(params.q_len, attention_flag_tile)) {
    const i64 matrix =
        static_cast<i64>(sequence) * params.mask_heads + (params.mask_heads > 1 ? head : 0);
    bits = params.mask_bits + matrix * params.q_len * words;
    flags = params.mask_flags + matrix * flags_rows * flags_row;
  }

  // The flag of rows x keys, a tile of multiples of 64: what is not empty and not full is mixed.
  // Parts past the mask's edges do not count.
  template <int rows, int keys>
  __device__ __forceinline__ int flag(int first_row, int first_key) const {
    constexpr int across = keys / attention_flag_tile, down = rows / attention_flag_tile;
    static_assert(rows % attention_flag_tile == 0 && keys % attention_flag_tile == 0);
    const int row = first_row / attention_flag_tile, key = first_key / attention_flag_tile;
    bool any = false, all = true;
#pragma unroll
    for (int i = 0; i < down; ++i) {
#pragma unroll
      for (int j = 0; j < across; ++j) {
        if (row + i >= flags_rows || key + j >= flags_row) continue;
        const int part = flags[static_cast<i64>(row + i) * flags_row + key + j];
        any |= part != tile_empty;
        all &= part == tile_full;
      }
    }
    return !any ? tile_empty : all ? tile_full : tile_mixed;
  }

  // The words of a row from the one that has the bit of `first_key` (a multiple of 32) on.
  __device__ __forceinline__ const u32* row_bits(int row, int first_key) const {
    return bits + static_cast<i64>(row) * words + first_key / 32;
  }
};

}  // namespace fftune
