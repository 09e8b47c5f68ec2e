// x = factor[0]·x in place, rounded once. Where the factor is 1 no element is read or written: the
// gradient of a loss that nothing was multiplied with is scaled in the time of a launch. With
// in-place=no the result is another tensor, y.
//
// With factor=rows each row has a factor of its own, factor[m]: the queries of far positions
// (Mistral 4). With factor=ids each element has that of its id, factor[ids[m, h]]: the weights of a
// token's experts (Gemma 4). An id of no factor gives 0.
#pragma once

#include <vector>

#include "registry/op.hpp"

namespace fftune {

/// Defined in scale.cpp; listed in kernels/catalog.cpp.
const Op& scale_op();

namespace scale {

bool is_in_place(const Problem& problem);

/// The elements that share a factor: all, those of a row, or those with the same id.
enum class Factors { one, rows, ids };
Factors factors_of(const Problem& problem);

std::vector<const Family*> cuda_families(), cpu_families();

}  // namespace scale
}  // namespace fftune
