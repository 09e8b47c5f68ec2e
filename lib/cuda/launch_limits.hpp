// The hardware limits of a launch, checked before it is tried.
#pragma once

#include <string>

#include "device/facts.hpp"
#include "device/program.hpp"

namespace fftune::cuda {

struct KernelNeeds {
  int registers = 0;            // a thread
  int static_shared_bytes = 0;  // a block
};

/// Why `launch` cannot run on a device of these facts, one line; empty if it can.
std::string launch_failure(const KernelLaunch& launch, const KernelNeeds& kernel,
                           const DeviceFacts& facts);

}  // namespace fftune::cuda
