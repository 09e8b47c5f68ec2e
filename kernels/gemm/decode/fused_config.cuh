// The configuration and parameters of the fused decode engine. Included by host and device code.
#pragma once

#include "gemm/form.cuh"
#include "gemm/params.cuh"

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
  /// 32-bit registers a thread for its weights and accumulators, which live together.
  constexpr int registers() const {
    return 2 * rows / 8 * (steps + 1) * 4 + out_rows / 8 * (out_steps + 1) * 4;
  }
  constexpr int shared_bytes() const {
    return warps * (2 * rows > out_rows ? 2 * rows : out_rows) * tokens * 4;
  }
};

struct fused_decode_params {
  gemm_params gate_up, down;
  unsigned char* workspace;
};

}  // namespace fftune
