// Measures the two ceilings of the CPU's roofline.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/backend.hpp"
#include "device/program.hpp"

namespace fftune {

/// A copy and a read by all threads, far larger than the last-level cache, and OpenBLAS's product
/// in f32 (which bf16 problems are computed in too); the best of several runs, about a second in
/// all.
Limits measure_cpu_limits(Parallel& pool, std::int64_t cache_bytes, std::size_t free_bytes);

}  // namespace fftune
