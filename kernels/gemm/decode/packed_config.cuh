// The tile configuration of the kernel for packed weights, and its shared memory. Included by host
// and device code.
#pragma once

#include "gemm/form.cuh"
#include "gemm/packed/layout.cuh"

namespace fftune {

struct packed_config {
  int tokens = 8;     // Rows of A: a multiple of 8, which are columns of the tensor core's operand.
  int tiles = 1;      // Tiles of 16 rows of each B that a warp takes.
  int row_warps = 1;  // Warps of a block that take other rows,
  int k_warps = 4;    // and warps that share the k of these rows.
  int unroll = 4;     // Blocks of 64 of k, of each tile, that a warp has in flight.

  static constexpr int stages = 3;  // of the tokens' pipeline

  constexpr int warps() const { return row_warps * k_warps; }
  constexpr int threads() const { return warps() * 32; }
  constexpr int rows() const { return row_warps * tiles * packed_rows; }  // of each B of a block
  constexpr int n_fragments() const { return tokens / 8; }
  /// Blocks of k of a stage: a run of `unroll` for each of the k warps.
  constexpr int stage_k_blocks() const { return k_warps * unroll; }
  constexpr int stage_bytes() const { return stage_k_blocks() * tokens * packed_k * 2; }
  /// Accumulators of a thread, in vectors of 4, of each B.
  constexpr int vectors() const { return tiles * n_fragments(); }
  /// Those that it finishes, once the k warps have added theirs up.
  constexpr int own_vectors() const { return (vectors() + k_warps - 1) / k_warps; }
  constexpr int reduction_bytes(int operands) const {
    return k_warps == 1 ? 0 : threads() * operands * vectors() * 16;
  }
  /// A block's accumulators in split-K.
  constexpr int share_bytes(int operands) const {
    return threads() * operands * own_vectors() * 16;
  }
  constexpr int shared_bytes(int operands) const {
    const int pipeline = stages * stage_bytes(), reduction = reduction_bytes(operands);
    return pipeline > reduction ? pipeline : reduction;
  }
  /// Whether scales multiply the operands, rather than the accumulators of each run of k: for many
  /// tokens these are more, and there are no registers for two sets of them. A scale for each k16
  /// step would be one for each MMA.
  constexpr bool scales_operands(packed_form form) const {
    return form.group != 0 && (tokens > 16 || form.scales_rows());
  }
  /// Scales of a run of `unroll` blocks, of each row.
  constexpr int scales_of_run(packed_form form) const {
    const int elements = unroll * packed_k;
    return form.group == 0 || form.group >= elements ? 1 : elements / form.group;
  }
  /// Registers of a thread: codes and scales in flight, accumulators, operands.
  constexpr int registers(int operands, packed_form form) const {
    const int of_scale = form.scale_bytes() == 4 || form.zeros ? 2 : 1;
    const int of_rows = form.scales_rows() ? 2 : 0;
    const int of_tile = 4 * unroll * form.parts() + of_scale * scales_of_run(form) + of_rows;
    const int sets = form.group == 0 || scales_operands(form) ? 1 : 2;
    return operands * tiles * (of_tile + 4 * sets * n_fragments()) + 4 * n_fragments() + 8;
  }
};

}  // namespace fftune
