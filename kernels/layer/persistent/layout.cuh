// What a CTA has: registers of its warps, stages of the pipeline, and shared memory in its order.
#pragma once

#include "layer/persistent/split.cuh"

namespace fftune {

struct persistent_layout : persistent_attention_split {
  // Neighbouring rows begin 16 banks apart for 16-byte reads of two rows at once, and 4 banks apart
  // for ldmatrix.
  static constexpr int row_padding = 64, value_padding = 16;
  static constexpr int most_packed_group = 128;
  static constexpr int weight_bytes(int elements) { return 2 * elements; }

  constexpr int other_registers() const {
    if (has_experts() && packs() && warps == 8) return ahead > 0 ? 128 : 112;
    return has_experts() || ranks > 0 || packs() ? warps == 8 ? 104 : 96 : ahead > 0 ? 72 : 56;
  }
  constexpr int consumer_registers() const {
    const int launched = 65536 / threads() / 8 * 8;
    const int left = (launched * threads() - 128 * other_registers()) / consumers() / 8 * 8;
    return left < 232 ? left : 232;
  }

  // Elements of a token's activations that are in shared memory at a time: all that are normalised,
  // and all of experts.
  constexpr int input_length() const {
    const int widest = hidden() > q_rows() ? hidden() : q_rows();
    const int longest = widest > d ? widest : d;
    const int unit = packs() || packs_head ? most_packed_group : chunk;
    const int fit = input_limit / (2 * tokens) / unit * unit;
    const int least = up(d, unit) * unit, most = up(longest, unit) * unit;
    return has_experts() ? most : fit < least ? least : fit < most ? fit : most;
  }

  // Whether the next part of a product's activations is asked for while the MMAs of one run. On an
  // H100 it makes 16 layers of Llama-3.2-1B with four tokens 794 us instead of 803, and with eight
  // 1,024 instead of 977: the words take 32 registers.
  static constexpr int most_requested_tokens = 5;
  constexpr bool requests() const {
    return tokens > 1 && tokens <= most_requested_tokens && !has_experts() && !packs() &&
           (input_length() < hidden() || input_length() < q_rows());
  }

  // A stage of packed weights: blocks of 16 rows and 64 elements of k, with as many codes as a
  // stage of dense weights has bytes, and the scales.
  constexpr int packed_blocks(packed_form of) const {
    return block_rows * weight_bytes(chunk) / (packed_part_bytes * of.parts());
  }
  constexpr packed_stage_shape packed_stage(packed_form of) const {
    return {of, packed_blocks(of)};
  }
  // Stages in flight that have as many bytes as `in_flight` full ones, of experts' rows of `k`: the
  // last stage of each row is partly empty.
  constexpr int in_flight_of(int k) const {
    const int k_blocks = up(k, packed_k), stage = packed_blocks(format);
    const int wanted = up(in_flight * up(k_blocks, stage) * stage, k_blocks);
    return wanted < stages ? wanted : stages;
  }

  // Shared memory, in its order.
  constexpr int token_columns() const { return tokens == 1 ? 1 : up(tokens, 2) * 2; }
  constexpr int stage_bytes() const {
    int bytes = block_rows * (weight_bytes(chunk) + row_padding);
    if (packs() && packed_stage(format).bytes() > bytes) bytes = packed_stage(format).bytes();
    if (packs_head && packed_stage(head_format).bytes() > bytes)
      bytes = packed_stage(head_format).bytes();
    return up(bytes, 128) * 128;
  }
  constexpr int barrier_bytes() const { return up(16 * stages, 128) * 128; }
  // Packed weights take tokens by ldmatrix.
  constexpr int input_stride() const {
    return 2 * input_length() + (packs() ? value_padding : row_padding);
  }
  constexpr int query_stride() const { return 2 * dim + row_padding; }
  constexpr int sums_stride() const { return 16 * token_columns() * 4; }  // of a warp and a block
  constexpr int sums_bytes() const { return most_blocks() * warps * sums_stride(); }
  constexpr int combine_bytes() const { return combined_rows() * unit_threads() * 24; }
  constexpr int input_at() const { return barrier_bytes() + stages * stage_bytes(); }
  // The heads of q, then those of the new k and v, take the place of the activations.
  constexpr int queries_at() const { return input_at(); }
  constexpr int new_rows_at() const {
    return queries_at() + per_sequence * own_heads() * query_stride();
  }
  constexpr int input_bytes() const {
    const int of_heads = per_sequence * (own_heads() * query_stride() + 4 * own_kv_rows());
    const int of_input = tokens * input_stride();
    return of_heads > of_input ? of_heads : of_input;
  }
  // Weights of a norm, and in front of them those of the one behind the product before, and the
  // residual stream.
  constexpr int residual_at() const { return input_at() + input_bytes(); }
  constexpr int residual_stride() const { return post_norms ? 2 * d : 0; }
  constexpr int post_norm_at() const { return residual_at() + tokens * residual_stride(); }
  constexpr int norm_at() const { return post_norm_at() + residual_stride(); }
  constexpr int sums_at() const { return norm_at() + 2 * d; }
  constexpr int combine_at() const { return sums_at() + sums_bytes(); }
  constexpr int statistics_at() const { return combine_at() + combine_bytes(); }
  constexpr int slots_at() const { return statistics_at() + 4 * 32; }  // of the new tokens
  constexpr int turns_at() const { return slots_at() + 8 * 8; }        // cosines and sines
  constexpr int choices_at() const {
    return turns_at() + (rotates ? 4 * per_sequence * rotary : 0);
  }
  constexpr int weights_at() const { return choices_at() + (has_experts() ? 4 * slots() : 0); }
  constexpr int shared_bytes() const { return weights_at() + (has_experts() ? 4 * slots() : 0); }
};

}  // namespace fftune
