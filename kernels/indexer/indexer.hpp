// The choice of keys of sparse attention (DSA, arXiv 2512.02556, "lightning indexer"): for each
// query the keys with the highest scores, to which attention is limited then.
//
//   score_ij = sum_h weights_ih relu(q_ih · k_j)    over indexer heads h
//   ids_i    = the `top` keys of the highest scores, in ascending order
//
// Where a query sees fewer keys, -1 is behind them. The first of equal scores is chosen. NaN
// is above every number, as in PyTorch's topk.
//
// Positive factors, such as 1/sqrt(dim), change no choice. All heads share a key, as in multi-query
// attention.
//
// The s queries of a sequence are its last: query i sees the keys j <= i + length - s. A prompt has
// s = kv. Keys beyond a length are not read. A length is cut to [0, kv].
//
// With k-format=e4m3 k has e4m3 elements, and a key's k_scale, in f32 [b, kv] and not negative, is
// a factor of its scores: k_j = k_scale_j stored_j.
//
// With pages k is [pages, page, dim], where key t of sequence i lies in page pages[i, t / page] at
// row t % page, and k_scale [pages, page]. A page outside [0, pages) is a page of zeros. Pages, or
// sequences, may be further apart than their rows: by k-block and scale-block elements, as in
// vLLM's cache, whose pages have the rows and then the scales.
//
// q [b, s, heads, dim], weights [b, s, heads] in f32, k [b, kv, dim], ids [b, s, top]. Scores are
// fp32.
#pragma once

#include <cstdint>
#include <vector>

#include "core/problem.hpp"
#include "kernels/attention/key_cache.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in indexer/op.cpp; listed in kernels/catalog.cpp.
const Op& indexer_op();

namespace indexer {

constexpr const char *stage_scores = "scores", *stage_choose = "choose";

constexpr std::int64_t usual_top = 2048;

/// A problem's sizes and options, read once.
struct Layer : attention::KeyCache {
  using KeyCache::KeyCache;

  std::int64_t heads = 0;                     // of the indexer
  std::int64_t dim = 0;                       // features of a head
  std::int64_t top = 0;                       // keys of a query
  std::int64_t k_block = 0, scale_block = 0;  // elements from a page, or a sequence, to the next
  bool e4m3 = false;                          // k is e4m3, with a scale for each key
  DType dtype = DType::f32;

  DType dtype_of_keys() const { return e4m3 ? DType::fp8 : dtype; }
};
Layer layer_of(const Problem& problem);

/// The definition in float64, of each stage.
void reference_scores(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);
void reference_choice(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

std::vector<const Family*> cuda_families(), cpu_families();

}  // namespace indexer
}  // namespace fftune
