// The parameters and the configuration of product.cu. Plain C++, for the host too.
#pragma once

#include "common/group_memory.cuh"
#include "gemm/decode/stream_shape.cuh"

namespace fftune {

struct summed_product_params {
  group_table loopback;      // where there is no table: of a rank that plays its peers
  const group_table* table;  // the rank's own memory, or null
  const void* a;             // [m, k]
  const void* b;             // [n, k]
  const void* residual;      // [m, n]
  void* y;                   // [m, n]
  int m, n, k, split_k;
  u32 tag;  // of the problem and the variant: peers must have the same
};

struct summed_product_config {
  int tokens = 8;  // Rows of A in the tensor core's operand: 8 or 16.
  int rows = 16;   // Rows of B that a block takes.
  int warps = 8;   // Warps of a block, which share k.
  int unroll = 4;  // 16-byte loads of a row that a thread issues at once.

  constexpr int threads() const { return warps * 32; }
  constexpr stream_shape shape() const {
    return {.operands = 1, .tokens = tokens, .rows = rows, .unroll = unroll};
  }
  /// The warps' accumulators, or the split-K reduction of a cluster.
  constexpr int shared_bytes() const {
    const int of_warps = shape().reduction_bytes(warps), of_splits = rows / 8 * 512;
    return of_warps > of_splits ? of_warps : of_splits;
  }
};

}  // namespace fftune
