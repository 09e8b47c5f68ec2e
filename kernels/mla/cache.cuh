// Rows of the cache of latent attention, and what the rows of queries see of them.
#pragma once

#include "common/types.cuh"
#include "mla/params.cuh"

namespace fftune {

// The parameters whose first member is `p`.
__device__ __forceinline__ const mla_list_params& mla_lists(const mla_params& p) {
  return reinterpret_cast<const mla_list_params&>(p);
}

// The keys of a sequence of the batch; with lists, the entries of a query's.
template <mla_form form>
__device__ __forceinline__ int mla_length(const mla_params& p, int sequence) {
  if constexpr (form.chosen) return mla_lists(p).top;
  if constexpr (form.lengths) return smaller(p.kv_len, larger(p.lengths[sequence], 0));
  return p.kv_len;
}

// Keys that query `query` of a sequence of `length` keys sees.
__device__ __forceinline__ int mla_visible(const mla_params& p, int query, int length) {
  return larger(0, smaller(length, query + length - p.queries + 1));
}

constexpr int mla_zeros = -1, mla_no_key = -2;

// The first element of a key, or with lists of the one of an entry. mla_zeros where its page is not
// in the cache; mla_no_key where an entry is no key that the query sees.
template <mla_form form>
__device__ __forceinline__ i64 mla_place(const mla_params& p, int sequence, int key) {
  if constexpr (form.chosen) {
    const mla_list_params& lists = mla_lists(p);
    key = lists.chosen[static_cast<i64>(sequence) * lists.top + key];
    const int query = sequence % lists.queries;
    sequence /= lists.queries;
    int length = p.kv_len;
    if constexpr (form.lengths) length = smaller(length, larger(p.lengths[sequence], 0));
    if (key < 0 || key >= length || key > query + length - lists.queries) return mla_no_key;
  }
  if constexpr (form.paged) {
    const i64 table = static_cast<i64>(sequence) * ceil_div(p.kv_len, p.page);
    const int page = p.pages[table + key / p.page];
    if (static_cast<u32>(page) >= static_cast<u32>(p.page_count)) return mla_zeros;
    return page * p.block + key % p.page * p.row;
  }
  return sequence * p.block + key * p.row;
}

// Where the log-sum-exp of a head is: [sequences, heads, queries].
template <mla_form form>
__device__ __forceinline__ i64 mla_lse_place(const mla_params& p, int sequence, int query,
                                             int head) {
  if constexpr (form.chosen) {
    const int queries = mla_lists(p).queries;
    return (static_cast<i64>(sequence / queries) * p.heads + head) * queries + sequence % queries;
  }
  return (static_cast<i64>(sequence) * p.heads + head) * p.queries + query;
}

}  // namespace fftune
