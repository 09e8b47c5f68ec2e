// The families of rmsnorm, one function each, defined in the file of the family's name.
#pragma once

#include "registry/family.hpp"

namespace fftune::rmsnorm {

const Family& forward_rows_family();
const Family& backward_rows_family();
const Family& forward_fallback_family();
const Family& backward_fallback_family();

const Family& cpu_forward_family();
const Family& cpu_backward_family();

}  // namespace fftune::rmsnorm
