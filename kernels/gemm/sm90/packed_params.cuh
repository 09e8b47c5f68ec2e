// The parameters of the sm_90a kernel for packed weights. Included by host and device code.
#pragma once

#include "common/types.cuh"
#include "gemm/packed/params.cuh"
#include "gemm/sm90/packed_config.cuh"

namespace fftune {

struct sm90_packed_params {
  packed_params packed;
  tensor_map tokens;     // A in boxes of [tokens, 64]
  tensor_map codes[2];   // [tiles of 16 rows, blocks of 512 bytes] in words, without the header
  tensor_map scales[2];  // [tiles of 16 rows, groups * 16], with groups alone; zeros, too
  tensor_map zeros[2];
};

}  // namespace fftune
