// What the queries of a sequence see of its keys.
#pragma once

#include "common/types.cuh"
#include "indexer/params.cuh"

namespace fftune {

template <bool has_lengths>
__device__ __forceinline__ int indexer_length(const indexer_params& p, int sequence) {
  if constexpr (has_lengths) return smaller(p.kv_len, larger(p.lengths[sequence], 0));
  return p.kv_len;
}

__device__ __forceinline__ int indexer_visible(const indexer_params& p, int query, int length) {
  return larger(0, smaller(length, query + length - p.queries + 1));
}

}  // namespace fftune
