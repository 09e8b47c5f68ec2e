// The CPU as a device.
#pragma once

#include <memory>

#include "device/backend.hpp"

namespace fftune {

/// The processor that this process runs on, with the cores it may use.
DeviceFacts cpu_facts();

/// Programs run on a pool of facts().multiprocessors threads, the caller's among them. Several
/// threads may enqueue at once; their programs take turns.
std::unique_ptr<Backend> open_cpu();

}  // namespace fftune
