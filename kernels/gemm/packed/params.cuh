// The parameters of the kernel for packed weights: gemm.b are the codes. Included by host and
// device code.
#pragma once

#include "gemm/form.cuh"

namespace fftune {

struct packed_params {
  gemm_params gemm;
  const void* scales[2];
  const unsigned char* zeros[2];  // null without zero points
  int groups;                     // scales of a row, with the places of the row's own
  int choices;                    // groups_ready::counted: ids of a row of A
  int loads_early;  // 1: B's first stages are loaded before the wait for the launch before
};

}  // namespace fftune
