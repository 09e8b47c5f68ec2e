// What a variant should take, before anything was measured.
#pragma once

#include <vector>

#include "registry/family.hpp"

namespace fftune {

/// In µs, good enough to rank: the family's own estimate, or what its launches say of waves of
/// blocks and of threads that wait for memory. `floor_us` is the roofline's floor of what it
/// computes. Positive; the floor itself for what runs on a CPU.
double estimated_us(const Family& family, const Problem& problem, const DeviceFacts& facts,
                    const Config& config, double floor_us);

/// What its first launch is like, as numbers that grow evenly where the device sees a doubling: all
/// threads, those of a block, and a block's dynamic shared memory. Zeros for what runs on a CPU.
std::vector<double> launch_traits(const Family& family, const Problem& problem,
                                  const DeviceFacts& facts, const Config& config);

}  // namespace fftune
