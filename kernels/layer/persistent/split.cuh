// Attention's share of a CTA: a split of a sequence's keys, and the outputs that it combines.
#pragma once

#include "layer/persistent/shares.cuh"

namespace fftune {

// Each CTA has one split of the keys of one sequence, for a group of heads. A warp has a kv head,
// and as many warps as there are of them every groups()-th block of 16 keys. Its queries are those
// of the sequence's tokens, token by token; 8 are the columns of an MMA.
struct persistent_attention_split : persistent_shares {
  constexpr int own_heads() const { return heads / head_groups; }
  constexpr int own_kv_heads() const { return kv_heads / head_groups; }
  constexpr int own_kv_rows() const { return own_kv_heads() * dim; }
  constexpr int splits() const { return blocks / (sequences() * head_groups); }
  constexpr int groups() const { return warps / own_kv_heads(); }
  constexpr int query_tiles() const { return up(group_heads() * per_sequence, 8); }
  // A thread has the scores and outputs of all of a warp's queries in registers.
  static constexpr int most_query_features = 384;
  constexpr bool fits_queries() const {
    return query_tiles() == 1 || (warps == 8 && query_tiles() * dim <= most_query_features);
  }
  // Heads of q, k and v of a sequence's tokens that a warp prepares, at most, and at a time.
  constexpr int prepared_heads() const {
    return up(per_sequence * (own_heads() + 2 * own_kv_heads()), warps);
  }
  constexpr int prepared_at_once() const {
    const int fit = 768 / dim;
    return prepared_heads() < fit ? prepared_heads() : fit;
  }
  // Keys of a split of `length` keys. Those of a stage lie in one page.
  constexpr int split_keys(int length) const {
    const int each = up(length, splits());
    const int keys = each < least_keys ? least_keys : each;
    return page > 0 ? up(keys, 16) * 16 : keys;
  }
  // Parts of a sequence that are combined, at most, of up to `cache` keys.
  constexpr int parts(int cache) const {
    const int keys = split_keys(cache);
    const int used = up(cache, least_keys) < splits() ? up(cache, least_keys) : splits();
    return used * (up(keys, 16) < groups() ? up(keys, 16) : groups());
  }
  // Units of four features that a CTA combines.
  constexpr int units() const { return tokens * q_rows() / 4; }
  constexpr int unit_threads() const {
    int power = 1;
    while (power < up(units(), blocks)) power *= 2;
    return power;
  }
  // Features of those that a thread stores, at most.
  constexpr int own_features() const { return up(4 * up(units(), blocks), consumers()); }
  constexpr int combined_rows() const {
    return unit_threads() <= 32 ? warps : consumers() / unit_threads();
  }
};

}  // namespace fftune
