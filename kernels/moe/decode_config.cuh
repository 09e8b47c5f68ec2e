// Configuration and limits of the kernels for few tokens of a mixture of experts (moe/decode.cu).
// Included by host and device code.
#pragma once

#include "gemm/decode/stream_shape.cuh"

namespace fftune {

/// How the weights of gate and up lie: as `packing` of gemm/form.cuh.
enum class weights_of_both { separate, halves, interleaved };

/// Granularity of an fp8 scale, as Scales of moe.hpp.
enum class chosen_scales { none, tensor, token, block };

struct chosen_config {
  /// Choices of all tokens, and experts, that a block has room for.
  static constexpr int most_choices = 1024, most_experts = 1024;

  int tokens = 8;  // Rows of an expert that a pass over its weights serves: 8 or 16.
  int rows = 8, warps = 4;
  int unroll = 1;  // Number of 16-byte loads of a row that a thread issues at once.
  int k_parts = 1;
  int l2_prefetch = 0;  // 1: of the weights of down.
  weights_of_both packed = weights_of_both::separate;
  chosen_scales scaled = chosen_scales::none;

  constexpr int threads() const { return 32 * warps; }
  constexpr stream_shape shape(int operands) const {
    return {operands, tokens, rows, unroll, mma_order::by_fragment};
  }
};

}  // namespace fftune
