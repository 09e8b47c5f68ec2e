// A stage of packed weights in a pipeline through shared memory. Included by host and device code.
#pragma once

#include "gemm/packed/layout.cuh"

namespace fftune {

/// Blocks of the same 16 rows: their codes, the scales of their groups, and behind these zero
/// points or the scales of rows. A scale of a whole row counts as one group.
struct packed_stage_shape {
  packed_form format;
  int blocks;

  constexpr int k() const { return blocks * packed_k; }
  constexpr int group() const { return format.group == 0 ? k() : format.group; }
  constexpr int groups() const { return (k() + group() - 1) / group(); }
  constexpr int block_bytes() const { return format.parts() * packed_part_bytes; }
  /// The scales of a group.
  constexpr int group_bytes() const { return packed_rows * format.scale_bytes(); }
  constexpr int scales_at() const { return blocks * block_bytes(); }
  constexpr int others_at() const { return scales_at() + groups() * group_bytes(); }
  constexpr int bytes() const {
    return others_at() + (format.zeros ? groups() * packed_rows : 0) +
           (format.scales_rows() ? packed_rows * 4 : 0);
  }
};

}  // namespace fftune
