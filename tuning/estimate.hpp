// What a variant should take, before anything was measured.
#pragma once

#include "registry/family.hpp"

namespace fftune {

/// In µs, good enough to rank: the family's own estimate, or what its launches say of waves of
/// blocks and of threads that wait for memory. `floor_us` is the roofline's floor of what it
/// computes. Positive; the floor itself for what runs on a CPU.
double estimated_us(const Family& family, const Problem& problem, const DeviceFacts& facts,
                    const Config& config, double floor_us);

}  // namespace fftune
