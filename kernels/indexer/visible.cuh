// Keys of a sequence: where they are, and what its queries see of them.
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

// The first element of a key, and its scale; -1 where its page is not in the cache.
struct key_place {
  i64 key, scale;
};

template <indexer_form form>
__device__ __forceinline__ key_place indexer_place(const indexer_params& p, int sequence, int key) {
  int block = sequence;
  if constexpr (form.paged) {
    block = p.pages[static_cast<i64>(sequence) * ceil_div(p.kv_len, p.page) + key / p.page];
    if (static_cast<u32>(block) >= static_cast<u32>(p.page_count)) return {-1, -1};
    key %= p.page;
  }
  return {block * p.k_block + static_cast<i64>(key) * form.dim, block * p.scale_block + key};
}

}  // namespace fftune
