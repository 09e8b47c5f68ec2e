// relu: y = max(x, 0), element by element.
#pragma once

#include "registry/family.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in relu.cpp; listed in kernels/catalog.cpp.
const Op& relu_op();

namespace relu {

/// One function a family, defined in the file of its name.
const Family& relu_cuda_family();
const Family& cpu_relu_family();

}  // namespace relu
}  // namespace fftune
