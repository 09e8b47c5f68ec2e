// The parameters of the sm_90a attention kernels: one struct, passed by value. Included by host and
// device code. The host encodes the tensor maps in use and leaves the others untouched.
#pragma once

#include "attention/params.cuh"
#include "common/tensor_map.cuh"

namespace fftune {

/// Tensor maps have three dimensions: heads * dim columns, tokens, sequences (of thd: one; paged:
/// columns, tokens of a page, pages). Boxes are attention_sm90_plan::slab_columns wide.
struct attention_sm90_params {
  attention_params attention;
  tensor_map q;  // boxes of 64 tokens
  tensor_map k;  // boxes of bn tokens; paged: of a page, if that has fewer
  tensor_map v;
  unsigned* next_tile;  // dynamic: 0 before and after the kernel
};

}  // namespace fftune
