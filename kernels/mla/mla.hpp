// Multi-head latent attention (MLA, arXiv 2405.04434) in its absorbed form: a few queries of each
// sequence over a cache that all heads share. A row of the cache has `rank` latent features, then
// `rope` features of the rotated key; its latent is key and value at once.
//
//   x_ij  = scale (q_latent_i · latent_j + q_rope_i · rope_j)    scale: 1/sqrt(rank + rope) where
//   lse_i = log(sum_j exp(x_ij))    natural, over keys j            none is given
//   out_i = sum_j exp(x_ij - lse_i) latent_j
//
// A model's layer has q_latent[h] = W_UK[h]ᵀ q_nope[h] before it and W_UV[h] out[h] behind it,
// where W_UK and W_UV are the rows of kv_b_proj; its scale is 1/sqrt(nope + rope), with yarn times
// m².
//
// The s queries of a sequence are its last: query i sees the keys j <= i + length - s. One without
// a key has out = 0 and lse = -inf. NaN and infinities of rows that no query sees have no effect.
//
// q_latent [b, s, heads, rank], q_rope [b, s, heads, rope], out as q_latent, lse [b, heads, s]. The
// cache is [b, kv, rank + rope]; with pages [pages, page, rank + rope], where key t of sequence i
// lies in page pages[i, t / page] at row t % page. A page outside [0, pages) is a page of zeros. A
// length is cut to [0, kv]. With top=n query i sees only the keys that its list has, chosen [b, s,
// n], as indexer writes it: entries that are no key which it would see without the list, such as
// -1, count as none, and a key that occurs twice counts twice. Rows of the cache may be further
// apart than their features (kv-row), and pages, or sequences, further than their rows (kv-block).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/attention/key_cache.hpp"
#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in mla/op.cpp; listed in kernels/catalog.cpp.
const Op& mla_op();

namespace mla {

constexpr std::int64_t most_rank = 1024;
constexpr std::int64_t most_rope = 256;

/// A problem's sizes and options, read once.
struct Layer : attention::KeyCache {
  using KeyCache::KeyCache;

  std::int64_t heads = 0;  // of queries
  std::int64_t rank = 0;   // latent features
  std::int64_t rope = 0;   // rotated features; 0: none
  std::int64_t row = 0;    // elements of the cache from a key to the next
  std::int64_t block = 0;  // the same from a page, or a sequence, to the next
  std::int64_t top = 0;    // keys of a query's list; 0: there are none
  bool lse = false;
  float scale = 0;
  DType dtype = DType::f32;

  std::int64_t width() const { return rank + rope; }
  /// Queries times heads of a sequence: rows that see the same cache.
  std::int64_t rows() const { return s * heads; }
  /// Keys that row `at` of a sequence of `length` keys sees.
  std::int64_t visible(std::int64_t at, std::int64_t length) const {
    return KeyCache::visible(at / heads, length);
  }
};
Layer layer_of(const Problem& problem);
/// As kernels divide the work: with lists a query is a sequence of its own, whose keys are the
/// entries of its list.
Layer divided_layer_of(const Problem& problem);

/// The key of an entry of a query's list; -1 where it is none that the query sees.
template <typename Key>
std::int64_t chosen_key(const Layer& layer, const Key* chosen, std::int64_t sequence,
                        std::int64_t query, std::int64_t entry, std::int64_t length) {
  const auto key =
      static_cast<std::int64_t>(chosen[(sequence * layer.s + query) * layer.top + entry]);
  return key < layer.visible(query * layer.heads, length) ? std::max<std::int64_t>(key, -1) : -1;
}
/// The first element of a key in the cache; -1 where its page is not in it.
template <typename Page>
std::int64_t place_of(const Layer& layer, const Page* pages, std::int64_t sequence,
                      std::int64_t key) {
  const std::int64_t block = block_of(layer, pages, sequence, key);
  return block < 0 ? -1 : block * layer.block + key % layer.keys_of_block() * layer.row;
}

/// The definition in float64.
void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

std::vector<const Family*> cuda_families(), cpu_families();

}  // namespace mla
}  // namespace fftune
