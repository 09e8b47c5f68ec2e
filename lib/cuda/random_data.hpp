// Random numbers in device memory: a GEMM on zeros draws less power and runs faster than a real
// one.
#pragma once

#include "core/dtype.hpp"
#include "cuda/session.hpp"
#include "device/backend.hpp"

namespace fftune::cuda {

/// Fills `buffer` with numbers of `dtype`, uniform in [-1, 1), the same ones each time; a block of
/// 2^20 elements repeats. The context must be current.
void fill_random(const Session& session, const Buffer& buffer, DType dtype);

}  // namespace fftune::cuda
