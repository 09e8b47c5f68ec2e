// The cost model: the predicted time of a variant, before anything is measured.
#pragma once

#include <vector>

#include "registry/family.hpp"

namespace fftune {

/// Predicted time in µs, good enough to rank: the family's own estimate, or one from its launches:
/// waves of blocks, and threads whose loads are in flight. `floor_us` is the roofline's floor of
/// what it computes. Positive; the floor itself for CPU families.
double cost_model_us(const Family& family, const Problem& problem, const DeviceFacts& facts,
                     const Config& config, double floor_us);

/// Traits of the family's first launch, as numbers that grow evenly with each doubling: all
/// threads, those of a block, and a block's dynamic shared memory. Zeros for a CPU family.
std::vector<double> launch_traits(const Family& family, const Problem& problem,
                                  const DeviceFacts& facts, const Config& config);

}  // namespace fftune
