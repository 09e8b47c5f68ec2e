// Programs of plain kernels for any width and alignment, with a block for each row.
#pragma once

#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"

namespace fftune::rmsnorm {

Program forward_fallback_program(const Layer& layer);
Program backward_fallback_program(const Layer& layer, const DeviceFacts& facts);

}  // namespace fftune::rmsnorm
