// x = factor[0]·x in place, rounded once. Where the factor is 1 no element is read or written: the
// gradient of a loss that nothing was multiplied with is scaled in the time of a launch. With
// in-place=no the result is another tensor, y.
#pragma once

#include <vector>

#include "registry/op.hpp"

namespace fftune {

/// Defined in scale.cpp; listed in kernels/catalog.cpp.
const Op& scale_op();

namespace scale {

bool is_in_place(const Problem& problem);

std::vector<const Family*> cuda_families();
std::vector<const Family*> cpu_families();

}  // namespace scale
}  // namespace fftune
