// The families of ffn, one function each, defined in the file of the family's name.
#pragma once

#include "registry/family.hpp"

namespace fftune::ffn {

const Family& cpu_blas_family();
const Family& cpu_plain_family();
const Family& cpu_stream_family();
const Family& cpu_tiles_family();

const Family& ffn_decode_family();
const Family& gate_up_decode_family();
const Family& down_decode_family();
const Family& gate_up_sm90_family();
const Family& down_sm90_family();
const Family& gate_up_sm80_family();
const Family& down_sm80_family();
const Family& gate_up_fallback_family();
const Family& down_fallback_family();

}  // namespace fftune::ffn
