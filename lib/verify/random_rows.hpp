// Random tensors whose row r depends on (seed, name, r) alone: any prefix of rows is the same for
// every number of rows, on every machine and with any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/dtype.hpp"
#include "device/program.hpp"

namespace fftune {

/// Fills `out` with rows x columns values of `dtype`, row-major, of mean `mean` and standard
/// deviation `scale`. Each is the sum of four uniform 16-bit integers (Irwin-Hall), which stands in
/// for the normal distribution: a few operations each, no libm and so the same bits everywhere, and
/// no value beyond 3.47 standard deviations that would overflow fp16.
void random_rows(std::uint64_t seed, std::string_view name, DType dtype, double scale,
                 std::int64_t rows, std::int64_t columns, void* out, Parallel& parallel,
                 double mean = 0);

}  // namespace fftune
