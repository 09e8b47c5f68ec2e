// The tile configuration and the parameters of the decode engine for unaligned rows. Included by
// host and device code.
#pragma once

#include "gemm/decode/stream_shape.cuh"
#include "gemm/form.cuh"

namespace fftune {

struct unaligned_config {
  int tokens = 8;       // rows of A in the tensor core's operand: 8 or 16
  int rows = 8;         // rows of each B that a block takes
  int warps = 8;        // of a block, which share k
  int unroll = 4;       // 16-byte loads of a row that a thread issues at once
  bool staged = false;  // a block copies the tokens behind its zeros to shared memory

  constexpr int threads() const { return warps * 32; }
  constexpr stream_shape shape(int operands) const {
    return {.operands = operands, .tokens = tokens, .rows = rows, .unroll = unroll};
  }
};

/// Rows of B that lie as far behind a 16-byte boundary as each other are this far apart.
constexpr int alignment_period(long long k) {
  int period = 1;
  while (k * period % 8 != 0) period *= 2;
  return period;
}

struct unaligned_params {
  gemm_params gemm;
  // [period][m][pitch]: the tokens, behind as many zeros as the rows of B of that alignment are
  // behind a boundary, and before zeros. Staged ones have that pitch in shared memory.
  const void* tokens;
  int period, pitch;
};

}  // namespace fftune
