// The blocks of the CPU families over OpenBLAS.
#pragma once

#include <vector>

#include "core/space.hpp"
#include "device/facts.hpp"
#include "kernels/attention/attention.hpp"

namespace fftune::attention {

/// Parameters block_q, block_k and threads.
Space block_space(const Layer& layer, const DeviceFacts& facts);
Config default_blocks(const Layer& layer, const DeviceFacts& facts);

std::vector<const Family*> cpu_forward_families();
std::vector<const Family*> cpu_backward_families();

}  // namespace fftune::attention
