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

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/problem.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in indexer/op.cpp; listed in kernels/catalog.cpp.
const Op& indexer_op();

namespace indexer {

constexpr const char *stage_scores = "scores", *stage_choose = "choose";

constexpr std::int64_t usual_top = 2048;

/// A problem's sizes and options, read once.
struct Layer {
  std::int64_t b = 0;                         // sequences
  std::int64_t s = 0;                         // queries of a sequence
  std::int64_t kv = 0;                        // keys of a sequence at most
  std::int64_t heads = 0;                     // of the indexer
  std::int64_t dim = 0;                       // features of a head
  std::int64_t top = 0;                       // keys of a query
  std::int64_t page = 0;                      // keys of a page; 0: not paged
  std::int64_t pages = 0;                     // in memory
  std::int64_t k_block = 0, scale_block = 0;  // elements from a page, or a sequence, to the next
  bool lengths = false;
  bool e4m3 = false;  // k is e4m3, with a scale for each key
  DType dtype = DType::f32;

  std::int64_t pages_of_sequence() const { return (kv + page - 1) / page; }
  /// Pages, or sequences, of keys, and the keys of one.
  std::int64_t blocks() const { return page > 0 ? pages : b; }
  std::int64_t keys_of_block() const { return page > 0 ? page : kv; }
  /// The most keys that a sequence of test data has: kv, or where sequences of that length do not
  /// fit in the pages together, its share of those.
  std::int64_t usual_kv() const {
    if (page == 0 || !lengths) return kv;
    return std::min(kv, std::max<std::int64_t>(pages * page / b, 1));
  }
  DType dtype_of_keys() const { return e4m3 ? DType::fp8 : dtype; }

  /// Keys that a query of a sequence of `length` keys sees.
  std::int64_t visible(std::int64_t query, std::int64_t length) const {
    return std::clamp<std::int64_t>(query + length - s + 1, 0, length);
  }
};
Layer layer_of(const Problem& problem);

/// The keys of a sequence: its length, cut to [0, kv].
template <typename Length>
std::int64_t length_of(const Layer& layer, const Length* lengths, std::int64_t sequence) {
  if (!layer.lengths) return layer.kv;
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(lengths[sequence]), 0, layer.kv);
}

/// The page, or sequence, that has a key of a sequence; -1 where it is not in memory.
template <typename Page>
std::int64_t block_of(const Layer& layer, const Page* pages, std::int64_t sequence,
                      std::int64_t key) {
  if (layer.page == 0) return sequence;
  const auto page =
      static_cast<std::int64_t>(pages[sequence * layer.pages_of_sequence() + key / layer.page]);
  return page < 0 || page >= layer.pages ? -1 : page;
}

/// The definition in float64, of each stage.
void reference_scores(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);
void reference_choice(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

std::vector<const Family*> cuda_families();
std::vector<const Family*> cpu_families();

}  // namespace indexer
}  // namespace fftune
