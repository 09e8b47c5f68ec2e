// The roofline's two ceilings, measured.
#pragma once

#include <functional>
#include <memory>

#include "core/dtype.hpp"
#include "cuda/cublaslt.hpp"
#include "cuda/session.hpp"
#include "device/backend.hpp"
#include "device/facts.hpp"

namespace fftune::cuda {

/// Times a large copy, and a product by cuBLASLt on random data; where that library is missing, the
/// datasheet's peak stands in and Limits::method says so. The context must be current. `library`
/// may throw Error(unavailable).
Limits measure_limits(const std::shared_ptr<const Session>& session, const DeviceFacts& facts,
                      DType dtype, const std::function<std::shared_ptr<const CublasLt>()>& library);

}  // namespace fftune::cuda
