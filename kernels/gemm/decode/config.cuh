// The tile configuration of the decode engine, and its shared memory. Included by host and device
// code.
#pragma once

#include "gemm/form.cuh"

namespace fftune {

struct decode_config {
  int tokens = 8;  // rows of A in the tensor core's operand: 8 or 16
  int rows = 16;   // of each B that a block takes
  int warps = 8;   // of a block, which share k
  int unroll = 4;  // 16-byte loads of a row that a thread issues at once

  constexpr int threads() const { return warps * 32; }
  constexpr int n_fragments() const { return rows / 8; }  // of 8 rows of B
  constexpr int k_group() const { return 32 * unroll; }   // elements of k that a warp takes at once
  /// Accumulators that a thread of the MMA fragment has for one of them.
  constexpr int values() const { return tokens / 4; }
  /// The warps' accumulators, or the split-K reduction of a cluster.
  constexpr int shared_bytes(const gemm_form& form) const {
    const int reduction = warps * values() * 128;
    return form.b_operands() * n_fragments() * (reduction > 512 ? reduction : 512);
  }
};

}  // namespace fftune
