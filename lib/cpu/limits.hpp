// Measures the two ceilings of the CPU's roofline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "device/backend.hpp"
#include "device/program.hpp"

namespace fftune {

/// The memory that it takes: as much as rotated buffers (measure/buffer_sets.hpp), two and a half
/// times the last-level cache, or a quarter of what is free.
std::size_t cpu_limits_bytes(std::int64_t cache_bytes, std::size_t free_bytes);

/// A copy and a read of the memory by all threads, and OpenBLAS's product in f32 (which bf16
/// problems are computed in too); the best of several runs, up to a second in all.
Limits measure_cpu_limits(Parallel& pool, std::span<std::byte> memory);

}  // namespace fftune
