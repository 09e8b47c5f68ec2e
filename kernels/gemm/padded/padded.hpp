// Engines for rows that are not aligned to 16 bytes.
#pragma once

#include "kernels/gemm/engine.hpp"

namespace fftune {

/// Rows are copied to aligned ones, an engine of such rows multiplies them, and its results are
/// copied back.
extern const Engine padded_sm90_engine;
extern const Engine padded_sm80_engine;
/// decode/unaligned.cpp: up to 16 rows of A, at the speed of reading an unaligned B once.
extern const Engine unaligned_decode_engine;

/// The engine beside `engine` for rows that are not aligned; null where there is none.
const Engine* unaligned_engine_of(const Engine& engine);

}  // namespace fftune
