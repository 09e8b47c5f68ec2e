// The tile configuration of the sm80 engine, and its shared-memory plan. Included by host and
// device code.
#pragma once

#include "gemm/form.cuh"

namespace fftune {

struct sm80_config {
  /// The output tile of a block; with two B operands it computes 2 bn columns.
  int bm = 128, bn = 128;
  int bk = 32;                   // elements of k in a stage
  int warps_m = 2, warps_n = 2;  // the grid of warps over the tile
  int stages = 3;                // of the shared-memory pipeline

  constexpr int warps() const { return warps_m * warps_n; }
  constexpr int threads() const { return warps() * 32; }
  constexpr int warp_m() const { return bm / warps_m; }
  constexpr int warp_n() const { return bn / warps_n; }
  /// fp32 accumulators of a thread.
  constexpr int accumulators(int b_operands) const { return b_operands * warp_m() * warp_n() / 32; }

  // Shared memory in bytes, in this order: row tables of grouped rows; the epilogue's tile; then
  // the pipeline, which the output tile and the split-K reduction reuse afterwards.

  /// The groups and where their tiles begin, then the tile's rows of A and of C.
  constexpr int table_bytes(const gemm_form& form) const {
    if (form.groups != grouping::rows) return 0;
    const int words = group_words(form.source) + 2 * bm;
    return (words + 31) / 32 * 128;
  }
  constexpr int stage_bytes(int b_operands) const { return (bm + b_operands * bn) * bk * 2; }
  /// 16 bytes of padding shift each row by four banks.
  constexpr int output_row_bytes() const { return bn * 2 + 16; }
  /// The tile of the epilogue qkv, in float32: 8 of padding keep the banks of a row's neighbours
  /// apart.
  constexpr int heads_pitch() const { return bn + 8; }
  /// The accumulators of a block, which split-K sends through a cluster's shared memory.
  constexpr int exchange_bytes(int b_operands) const { return 4 * b_operands * bm * bn; }
  constexpr int shared_bytes(const gemm_form& form, bool exchanges = false) const {
    int bytes = stages * stage_bytes(form.b_operands());
    const int row_bytes = form.is_qkv() ? heads_pitch() * 4 : output_row_bytes();
    if (bytes < bm * row_bytes) bytes = bm * row_bytes;
    if (exchanges && bytes < exchange_bytes(form.b_operands()))
      bytes = exchange_bytes(form.b_operands());
    return table_bytes(form) + epilogue_tile_bytes + bytes;
  }

  /// 32-bit words of a mask_groups, or of a routed_groups and its group_tiles (groups.cuh).
  static constexpr int group_words(group_source source) {
    return source == group_source::mask ? 1060 : 2 * 1028;
  }
  static constexpr int epilogue_tile_bytes = 128;  // a line, so that the pipeline stays aligned
};

}  // namespace fftune
