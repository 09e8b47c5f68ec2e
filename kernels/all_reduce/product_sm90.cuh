// The parameters of product_sm90.cu. Plain C++, for the host too.
#pragma once

#include "common/group_memory.cuh"
#include "gemm/sm90/config.cuh"

namespace fftune {

struct summed_sm90_params {
  sm90_params gemm;          // the first: its address is this struct's
  group_table loopback;      // where there is no table: of a rank that plays its peers
  const group_table* table;  // the rank's own memory, or null
  const void* residual;      // [m, n]
  void* y;                   // [m, n]
  u32 tag;                   // of the problem and the variant: peers must have the same
};

}  // namespace fftune
