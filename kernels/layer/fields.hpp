// The sizes and options of the op layer.
#pragma once

#include "kernels/common/op_parts.hpp"

namespace fftune::layer {

/// The op without what follows from its parts.
OpFacts facts();

}  // namespace fftune::layer
