// The work of the sm_90a attention backward's CTAs: a key block of a head of k and v each, and the
// query blocks that see some of it.
#pragma once

#include "attention/mask.cuh"
#include "attention/sm90/backward_config.cuh"

namespace fftune {

// The sequence of `tokens` rows whose blocks, of `size` rows each, include number `block`: where
// several begin inside one block, each has blocks of its own, so sequence i begins at block
// offsets[i] / size + i. A sequence's last block may be followed by one that is nobody's; it counts
// as the sequence's. A block before the first sequence counts as that one's.
__device__ __forceinline__ int sequence_of_block(const int* offsets, int tokens, int batch,
                                                 int size, int block) {
  int first = 0, last = batch;
  while (last - first > 1) {
    const int middle = (first + last) / 2;
    if (bounded(offsets[middle], 0, tokens) / size + middle <= block) {
      first = middle;
    } else {
      last = middle;
    }
  }
  return first;
}

// Whether sequences follow each other. Where they do not, key blocks that wait for each other might
// do so for ever. All lanes of a warp.
__device__ __forceinline__ bool are_ordered(const int* offsets, int batch, int tokens) {
  bool ordered = true;
  for (int i = threadIdx.x % 32; i <= batch; i += 32) {
    const int before = i > 0 ? offsets[i - 1] : 0;
    ordered &= before <= offsets[i] && offsets[i] <= tokens;
  }
  return __all_sync(~0u, ordered) != 0;
}

// A query block of one head, by its number among those of all sequences.
struct query_block {
  attention_sequence sequence;
  int first_row;  // in the sequence; there is none if this is beyond its q_len
};

template <attention_form form, int bm>
__device__ __forceinline__ query_block query_block_of(const attention_params& params, int block) {
  if constexpr (form.packed_sequences()) {
    const int index = sequence_of_block(params.offsets, params.q_len, params.batch, bm, block);
    const attention_sequence sequence = sequence_of<form>(params, index);
    const int in_sequence = block - sequence.q_first / bm - index;
    return {sequence, in_sequence < 0 ? sequence.q_len : in_sequence * bm};
  } else {
    const int blocks = ceil_div(params.q_len, bm);
    return {sequence_of<form>(params, block / blocks), block % blocks * bm};
  }
}

// A key block, and the query blocks that see it: [first, last).
template <attention_form form, sm90_backward_config config>
struct key_block_work {
  static constexpr int bm = config.bm, bn = config.bn;
  attention_sequence sequence;
  int kv_head;
  int first_key;   // in the sequence
  int kv_rows;     // the sequence's rows of dk and dv: with lengths more than it has keys
  int first_rows;  // its first query block, times bm, among those of all sequences
  int first, last;
  bool in_turns = form.deterministic;

  // CTAs begin in the order of their numbers. The heads of `group` have their queries in L2
  // together; among these, key blocks come in order: with a causal mask those with the most work
  // first. A CTA waits for lower key blocks of its head alone, which began before it.
  __device__ __forceinline__ key_block_work(const attention_params& params, int number) {
    const int heads = form.packed_sequences() ? params.kv_heads : params.kv_heads * params.batch;
    const int blocks = sm90_backward_key_blocks(form, params.batch, params.kv_len, bn);
    const int group = number / (params.group * blocks), in_group = number % (params.group * blocks);
    const int first_head = group * params.group;
    const int together = smaller(params.group, heads - first_head);
    int head = first_head + in_group % together, block = in_group / together, index = 0;
    if constexpr (form.packed_sequences()) {
      kv_head = head;
      index = sequence_of_block(params.kv_offsets, params.kv_len, params.batch, bn, block);
    } else {
      kv_head = head % params.kv_heads;
      index = head / params.kv_heads;
    }
    sequence = sequence_of<form>(params, index);
    kv_rows = params.kv_len;
    first_rows = index * ceil_div(params.q_len, bm) * bm;
    if constexpr (form.packed_sequences()) {
      kv_rows = sequence.kv_len;
      first_rows = (sequence.q_first / bm + index) * bm;
      block -= sequence.kv_first / bn + index;
      if (block < 0) block = ceil_div(kv_rows, bn);
      if constexpr (form.deterministic) {
        in_turns = are_ordered(params.offsets, params.batch, params.q_len) &&
                   are_ordered(params.kv_offsets, params.batch, params.kv_len);
      }
    }
    first_key = block * bn;
    first = 0;
    last = ceil_div(sequence.q_len, bm);
    const int keys_end = smaller(first_key + bn, sequence.kv_len);
    if constexpr (form.mask == attention_mask::causal) {
      first = larger(0, first_key - sequence.shift()) / bm;
    }
    if constexpr (form.window) {
      last =
          smaller(last, ceil_div(larger(0, keys_end - 1 - sequence.shift() + params.window), bm));
    }
    if (first_key >= keys_end) last = 0;
    first = smaller(first, last);
  }

  // Whether every query of the block sees every key, whatever bits say.
  __device__ __forceinline__ bool is_full(const attention_params& params, int block) const {
    const key_range common =
        common_keys<form>(params, sequence, block * bm, smaller(block * bm + bm, sequence.q_len));
    return first_key >= common.first && first_key + bn <= common.last;
  }

  // The flag of a query block of `head`.
  __device__ __forceinline__ int flag(const attention_params& params, int head, int block) const {
    int flag = is_full(params, block) ? tile_full : tile_mixed;
    if constexpr (form.mask == attention_mask::packed) {
      const packed_mask mask(params, sequence.index, head);
      const int last_row = smaller(block * bm + bm - 1, params.q_len - 1) / attention_flag_tile;
      const int last_key = smaller(first_key + bn - 1, params.kv_len - 1) / attention_flag_tile;
      bool any = false, all = true;
      for (int row = block * bm / attention_flag_tile; row <= last_row; ++row) {
        for (int key = first_key / attention_flag_tile; key <= last_key; ++key) {
          const int part = mask.flags[static_cast<i64>(row) * mask.flags_row + key];
          any |= part != tile_empty;
          all &= part == tile_full;
        }
      }
      // In a fixed order, every key block takes its turn, even to add zeros.
      if (!any && !form.deterministic) return tile_empty;
      if (!all) return tile_mixed;
    }
    return flag;
  }

  // How many key blocks add to the query block's dq before this one.
  __device__ __forceinline__ int turn(const attention_params& params, int block) const {
    int earliest = 0;
    if constexpr (form.window) {
      // The first key block whose last key is one that the first query sees.
      const int key = block * bm + sequence.shift() - params.window + 2;
      earliest = larger(0, ceil_div(larger(key, 1), bn) - 1);
    }
    return first_key / bn - earliest;
  }
};

// Work of a CTA for other heads of k and v, with `beside`: for one that is scheduled next, and for
// one that was, or -1. Heads of the first group are prepared by a launch.
template <attention_form form, sm90_backward_config config>
struct beside_work {
  int next = -1, previous = -1;
  int part, parts;  // the CTA's share of their query blocks

  // As in key_block_work, with a number that is read again: registers are not to hold it till here.
  __device__ __forceinline__ explicit beside_work(const attention_params& params) {
    int number;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(number));
    const int heads = params.kv_heads * params.batch;
    parts = sm90_backward_key_blocks(form, 1, params.kv_len, config.bn);
    const int group = number / (params.group * parts), in_group = number % (params.group * parts);
    const int left = heads - group * params.group, together = smaller(params.group, left);
    const int head = group * params.group + in_group % together;
    part = in_group / together;
    if (in_group % together < left - params.group) next = head + params.group;
    if (group >= 2 && together == params.group) previous = head - 2 * params.group;
  }

  // The first of `count` query blocks that belongs to a part: with a causal mask parts with more
  // work of their own have more of them.
  __device__ __forceinline__ int first_of(int part, int count) const {
    if constexpr (form.mask == attention_mask::causal && !form.window) {
      const i64 left = parts - part;
      return count - static_cast<int>(count * left * left / (parts * parts));
    }
    return static_cast<int>(static_cast<i64>(count) * part / parts);
  }
};

}  // namespace fftune
