// How much of a stream of weights a warp has in flight, and the registers and shared memory that
// this takes (gemm/decode/stream.cuh). Included by host and device code.
#pragma once

namespace fftune {

/// The order of a step's MMAs. Every accumulator adds its products in the order of k in both.
enum class mma_order {
  by_k,         // all fragments of one part of k, then those of the next
  by_fragment,  // all of k of one fragment: expanded weights need registers for one fragment alone
};

/// Tokens of a kernel at most: the 16 rows of A of an MMA, or the 8 columns of B.
constexpr int most_stream_rows = 16, most_stream_columns = 8;
/// Rows of tokens in the operand A of `m` tokens.
constexpr int stream_tokens(long long m) {
  return m <= 8 ? 8 : most_stream_rows;
}

struct stream_shape {
  int operands = 1;  // Matrices of weights that are multiplied by the same tokens.
  int tokens = 8;    // Rows of tokens in the operand of an MMA: 8 or 16.
  int rows = 8;      // Rows of each matrix that a warp takes; 8 are a fragment.
  int unroll = 1;    // 16-byte loads of a row that a thread issues at once.
  mma_order order = mma_order::by_k;

  constexpr int n_fragments() const { return rows / 8; }
  constexpr int halves() const { return tokens / 8; }  // of the tokens, 8 rows each
  /// 16-byte loads of weights that a thread has in flight.
  constexpr int loads() const { return operands * n_fragments() * unroll; }
  /// Accumulators of a thread and fragment that belong to tokens.
  constexpr int values() const { return tokens / 4; }
  /// Registers of a thread for weights in flight and accumulators.
  constexpr int weight_registers() const { return 4 * (loads() + operands * n_fragments()); }
  /// Those, and the tokens that are in flight beside the weights.
  constexpr int registers() const { return weight_registers() + 4 * halves() * unroll; }
  /// Bytes of shared memory in which `warps` warps leave their accumulators.
  constexpr int reduction_bytes(int warps) const {
    return warps * operands * n_fragments() * 32 * values() * 4;
  }
};

/// Registers that a thread can have if its block has an SM to itself.
constexpr int most_registers(int threads) {
  return 65536 / threads < 255 ? 65536 / threads : 255;
}

}  // namespace fftune
