// The families of masked-linear and masked-ffn, one function each.
#pragma once

#include "registry/family.hpp"

namespace fftune::masked {

const Family& linear_sm90_family();
const Family& dx_sm90_family();
const Family& dw_sm90_family();
const Family& gate_up_sm90_family();
const Family& down_sm90_family();

const Family& linear_sm80_family();
const Family& gate_up_sm80_family();
const Family& down_sm80_family();

const Family& linear_fallback_family();
const Family& dx_fallback_family();
const Family& dw_fallback_family();
const Family& gate_up_fallback_family();
const Family& down_fallback_family();

const Family& linear_cpu_blas_family();
const Family& ffn_cpu_blas_family();
const Family& linear_cpu_plain_family();
const Family& cpu_backward_family();
const Family& ffn_cpu_plain_family();

}  // namespace fftune::masked
