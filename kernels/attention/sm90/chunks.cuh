// Batch invariance: how the sums over chunks of a row's keys are added up.
//
// A chunk is a fixed number of keys from a multiple of it on, so it depends on the positions of
// keys alone. Each has sums of its own, and these are added up from the last chunk to the first. So
// a row has the same bits where one CTA passes over all chunks and where each chunk is another
// CTA's.
#pragma once

#include "attention/softmax.cuh"

namespace fftune {

struct chunk_factors {
  float sums, chunk;
};

// Factors of the sums so far and of those of a further chunk; `reference` becomes that of
// both. A chunk of whose keys a row sees none changes nothing.
__device__ __forceinline__ chunk_factors chunk_factors_of(float& reference, float of_chunk) {
  const float largest = fmaxf(reference, of_chunk), before = reference;
  reference = largest;
  if (largest == minus_infinity()) return {1.0f, 1.0f};
  return {approximate_exp2(before - largest), approximate_exp2(of_chunk - largest)};
}

// The same two roundings wherever it is compiled.
__device__ __forceinline__ float add_chunk(float sum, float value, chunk_factors by) {
  return __fmaf_rn(sum, by.sums, __fmul_rn(value, by.chunk));
}

}  // namespace fftune
