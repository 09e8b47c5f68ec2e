// The order in which a strategy tries variants.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fftune {

/// 0 to `count`-1: the first `fixed` in place, the rest shuffled. The same on every platform, which
/// std::shuffle does not promise.
std::vector<std::size_t> shuffled(std::size_t count, std::size_t fixed, std::uint64_t seed);

/// The same, but with every other one of the rest in the order of its predicted time: if the time
/// is too short for all, half of it goes to the most promising variants and half to random ones.
std::vector<std::size_t> half_by_prediction(const std::vector<double>& estimates, std::size_t fixed,
                                            std::uint64_t seed);

}  // namespace fftune
