// The one tile configuration of the simt engine. Included by host and device code.
#pragma once

#include "gemm/form.cuh"

namespace fftune {

struct simt_config {
  static constexpr int bm = 64, bk = 16, threads = 256;
  static constexpr int half_columns = 64;  // that a block computes at a time

  /// Columns of a work tile: all that share a scale, where the kernel finds those of C; a head.
  static constexpr int bn(const gemm_form& form) {
    if (form.is_qkv()) return form.qkv.dim;
    return half_columns * (form.finds_scales() ? 2 : 1);
  }
};

}  // namespace fftune
