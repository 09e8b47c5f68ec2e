// The parameters of the sm_90a GEMM kernel: one struct, passed by value. Included by host and
// device code. The host encodes the tensor maps in use and leaves the others untouched.
#pragma once

#include "common/types.cuh"
#include "gemm/form.cuh"
#include "gemm/params.cuh"

namespace fftune {

struct sm90_params {
  gemm_params gemm;
  tensor_map a[2];       // as gemm_params::a
  tensor_map b[2][2];    // [group][operand or K-concatenated pair]; stacked: b[0], 3-D
  tensor_map out[4];     // sm90_out_index()
  tensor_map source[4];  // linear: as out, the addends; activation_gradient: gate, up
  tensor_map reuse;      // A rows gathered by an earlier tile, for A reuse
  qkv_params qkv;        // epilogue qkv, whose parts' maps b and out have in their order
};

/// The index in `out` of stored value `value` (C, gate, up; d_gate, d_up, hidden) of output
/// `output`, and of group `group` in a grouped reduction of two groups, each with its own C.
constexpr int sm90_out_index(const gemm_form& form, int value, int output, int group) {
  const bool own = form.groups == grouping::reduction && !form.stacked;
  return value + output + (own ? 2 * group : 0);
}

}  // namespace fftune
