// The tile configuration of the decode engine, and its shared memory. Included by host and device
// code.
#pragma once

#include "gemm/decode/stream_shape.cuh"
#include "gemm/form.cuh"

namespace fftune {

struct decode_config {
  int tokens = 8;  // Rows of A in the tensor core's operand: 8 or 16.
  int rows = 16;   // Rows of each B that a block takes.
  int warps = 8;   // Warps of a block, which share k.
  int unroll = 4;  // Number of 16-byte loads of a row that a thread issues at once.
  /// Percentage of its weights that a block prefetches to L2 before the preceding kernels are
  /// complete, besides its first loads.
  int l2_prefetch = 0;

  constexpr int threads() const { return warps * 32; }
  constexpr int n_fragments() const { return rows / 8; }  // of 8 rows of B
  constexpr stream_shape shape(int operands) const {
    return {.operands = operands, .tokens = tokens, .rows = rows, .unroll = unroll};
  }
  /// Blocks that have a head of the epilogue qkv; with a norm of heads they are a cluster.
  constexpr int blocks_of_head(const gemm_form& form) const {
    return form.is_qkv() ? form.qkv.dim / rows : 1;
  }
  /// The feature of its head that row `i` of block `part` of the head computes. A block with a
  /// partial head that is rotated by halves takes matching features from both halves.
  constexpr bool has_pairs(const gemm_form& form, int part) const {
    return form.qkv.rotation == head_rotation::halves && blocks_of_head(form) > 1 &&
           part * rows < form.qkv.rotary;
  }
  /// Which pair of its head the block's pair `i`, of rows / 2, is.
  constexpr int pair_of(const gemm_form& form, int part, int i) const {
    return blocks_of_head(form) > 1 ? part * (rows / 2) + i : i;
  }
  /// Which of the block's pairs row `i` belongs to.
  constexpr int own_pair(const gemm_form& form, int i) const {
    if (form.qkv.rotation == head_rotation::interleaved) return i / 2;
    return i % (blocks_of_head(form) > 1 ? rows / 2 : form.qkv.rotary / 2);
  }
  constexpr int feature_of(const gemm_form& form, int part, int i) const {
    if (!has_pairs(form, part)) return part * rows + i;
    const int half = rows / 2;
    return part * half + (i < half ? i : form.qkv.rotary / 2 + i - half);
  }
  /// The warps' accumulators, or the split-K reduction of a cluster.
  constexpr int reduction_bytes(const gemm_form& form) const {
    const int of_warps = shape(form.b_operands()).reduction_bytes(warps);
    const int of_splits = form.b_operands() * n_fragments() * 512;
    return of_warps > of_splits ? of_warps : of_splits;
  }
  /// Rotated heads add a cosine and a sine of each token and pair.
  constexpr int shared_bytes(const gemm_form& form) const {
    return reduction_bytes(form) + (form.qkv.rotates() ? tokens * rows * 4 : 0);
  }
};

}  // namespace fftune
