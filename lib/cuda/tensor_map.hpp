// Tensor maps (TMA descriptors): how TMA addresses a matrix.
#pragma once

#include <cuda.h>

#include "cuda/driver.hpp"
#include "device/program.hpp"

namespace fftune::cuda {

/// The map of `argument`'s matrix at `address` (16-byte aligned). Throws Error(unavailable) if the
/// driver does not take its shape.
CUtensorMap encode_tensor_map(const Driver& driver, const TensorMapArgument& argument,
                              void* address);

}  // namespace fftune::cuda
