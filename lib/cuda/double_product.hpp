// A product in float64 of matrices on the host, by cuBLASLt.
#pragma once

#include "cuda/cublaslt.hpp"
#include "cuda/session.hpp"
#include "device/program.hpp"

namespace fftune::cuda {

/// The context must be current. Throws Error(unavailable) if the library does not take the product
/// or memory is short, Error(device_fault).
void double_product(const Session& session, const CublasLt& library, const DoubleProduct& product);

}  // namespace fftune::cuda
