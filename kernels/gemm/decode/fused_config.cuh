// The configuration and parameters of the fused decode engine. Included by host and device code.
#pragma once

#include "gemm/decode/stream_shape.cuh"
#include "gemm/form.cuh"

namespace fftune {

struct fused_decode_config {
  int tokens;            // Rows of A in the tensor core's operand: 8 or 16.
  int rows;              // Hidden features of a block.
  int out_rows;          // Features of y of a block.
  int warps;             // Warps of a block, which split k.
  int steps, out_steps;  // Steps of 32 elements of k per warp, over d and over h.
  /// A thread polls one word of a batch before it loads the others: less traffic while blocks are
  /// still writing, but one more round trip.
  bool poll_first;
  /// The second GEMM's weights are loaded when half of the first's have arrived, so that they do
  /// not delay them.
  bool late_down;

  constexpr int threads() const { return warps * 32; }
  /// A warp's weights: gate's rows and then up's, and down's.
  constexpr stream_shape gate_up() const {
    return {.tokens = tokens, .rows = 2 * rows, .unroll = steps};
  }
  constexpr stream_shape down() const {
    return {.tokens = tokens, .rows = out_rows, .unroll = out_steps};
  }
  /// 32-bit registers a thread for its weights and accumulators, which live together.
  constexpr int registers() const {
    return gate_up().weight_registers() + down().weight_registers();
  }
  constexpr int shared_bytes() const {
    const int first = gate_up().reduction_bytes(warps), second = down().reduction_bytes(warps);
    return first > second ? first : second;
  }
};

struct fused_decode_params {
  gemm_params gate_up, down;
  unsigned char* workspace;
};

}  // namespace fftune
