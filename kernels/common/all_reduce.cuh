// The parameters that the kernels of all-reduce take. Plain C++, for the host too.
#pragma once

#include "common/group_memory.cuh"

namespace fftune {

struct all_reduce_params {
  group_table loopback;      // where there is no table: of a rank that plays its peers
  const group_table* table;  // the rank's own memory, or null
  const void* x;             // [rows, d]: the rank's summand
  const void* residual;      // [rows, d]
  const void* w;             // [d]
  void* y;                   // [rows, d]
  void* sum;                 // [rows, d]
  float* scales;             // of y in fp8: [rows], written; or the one that is given
  i64 rows;
  i64 chunk_rows;  // of all_reduce_chunks: rows that are announced together
  int d;
  float eps;
  u32 tag;  // of the problem and the variant: peers must have the same
};

}  // namespace fftune
