// The families of ffn, one function each, defined in the file of the family's name.
#pragma once

#include "registry/family.hpp"

namespace fftune::ffn {

const Family& cpu_blas_family();
const Family& cpu_plain_family();

}  // namespace fftune::ffn
