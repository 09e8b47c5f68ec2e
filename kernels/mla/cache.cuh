// Rows of the cache of latent attention, and what the rows of queries see of them.
#pragma once

#include "common/types.cuh"
#include "mla/params.cuh"

namespace fftune {

template <mla_form form>
__device__ __forceinline__ int mla_length(const mla_params& p, int sequence) {
  if constexpr (form.lengths) return smaller(p.kv_len, larger(p.lengths[sequence], 0));
  return p.kv_len;
}

// Keys that query `query` of a sequence of `length` keys sees.
__device__ __forceinline__ int mla_visible(const mla_params& p, int query, int length) {
  return larger(0, smaller(length, query + length - p.queries + 1));
}

// The first element of a key; -1 where its page is not in the cache.
template <mla_form form>
__device__ __forceinline__ i64 mla_place(const mla_params& p, int sequence, int key) {
  if constexpr (form.paged) {
    const i64 table = static_cast<i64>(sequence) * ceil_div(p.kv_len, p.page);
    const int page = p.pages[table + key / p.page];
    if (static_cast<u32>(page) >= static_cast<u32>(p.page_count)) return -1;
    return page * p.block + key % p.page * p.row;
  }
  return sequence * p.block + key * p.row;
}

}  // namespace fftune
