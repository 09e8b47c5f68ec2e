// The form and the parameters of the kernels of mla. Included by host and device code.
#pragma once

#include "gemm/form.cuh"

namespace fftune {

/// The facts that kernels are compiled for: one template argument.
struct mla_form {
  element type = element::bf16;
  int rank = 512;
  int rope = 0;
  bool paged = false;
  bool lengths = false;
  bool lse = false;
  bool chosen = false;  // each query has a list of keys

  constexpr int width() const { return rank + rope; }
};

struct mla_params {
  const void* q_latent;  // [batch, queries, heads, rank]
  const void* q_rope;    // [batch, queries, heads, rope]
  const void* cache;     // rows of rank + rope elements
  const int* pages;      // [batch, ceil(kv_len / page)]; outside [0, page_count): a page of zeros
  const int* lengths;    // [batch]
  void* out;             // as q_latent
  float* lse;            // [batch, heads, queries]

  float* partials;  // results of parts of sequences
  int* counters;    // [groups, row blocks, 2], zeros before and after a launch

  long long row,
      block;  // elements of the cache from a key to the next, and from a page or sequence
  int batch, queries, heads, kv_len, page, page_count;
  float scale;
};

/// Of queries with lists of keys: each is a sequence of the batch, with one query.
struct mla_list_params {
  mla_params mla;
  const int* chosen;  // [batch, top] keys; others than those that a query sees count as none
  int top, queries;   // the queries of a sequence
};

}  // namespace fftune
