// A hash of a run's results, which identifies runs that agree in every bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/program.hpp"

namespace fftune {

/// The same for the same bytes on every machine, however many threads there are.
std::uint64_t hash_of_bits(const std::byte* data, std::size_t bytes, Parallel& parallel);

}  // namespace fftune
