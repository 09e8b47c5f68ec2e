// Attention: out = softmax(cap(scale q kᵀ) + bias, over the allowed keys) v, for each head.
//
//   x_ij  = scale · (q_i · k_j)               scale: 1/sqrt(dim) where none is given
//   x_ij  = softcap · tanh(x_ij / softcap)    where there is a soft cap, as Gemma 2 has
//   x_ij += bias_ij                           where there is one
//   lse_i = log(sum_j exp(x_ij))              natural, over the allowed keys j; and exp(sink)
//   out_i = sum_j exp(x_ij - lse_i) v_j       over the allowed keys j
//
// A sequence has q_len queries and kv_len keys, and its last query is at its last key: query i has
// the position p = i + kv_len - q_len among the keys. It may see key j < kv_len if
//   mask causal:          j <= p                    (aligned at the bottom right)
//   a window of w keys:   j > p - w                 (those to its left, itself among them)
//   mask bool or packed:  the byte or bit of (i, j) is not zero
// hold, as far as the problem asks for them. A query without any allowed key has out = 0, lse =
// -inf (or the sink), and adds nothing to any gradient.
//
// Layout bshd: q [b, s, heads, dim], k and v [b, kv, kv-heads, dim]; every sequence has s queries
// and kv keys, or `lengths` of its keys. Layout thd: q [s, heads, dim], k and v [kv, kv-heads,
// dim], the sequences one after the other; sequence i has the queries offsets[i] to offsets[i + 1],
// and the keys of the same range or of kv_offsets. With pages, k and v are [pages, page, kv-heads,
// dim] in both layouts, kv counts the keys that a sequence may have, and key t of sequence i lie
// in page pages[i, t / page] at row t % page. A page outside [0, pages) is a page of zeros. A
// length is cut to [0, kv], the offsets of a sequence to the tokens that there are, none before the
// sequence's first: no value of an index leads outside the tensors. Head h of q reads head h /
// (heads / kv-heads) of k and v. q, k and v may be parts of wider rows (q-row, k-row, v-row), as of
// a product that makes all three. Heads of k and v may be further apart than dim (kv-head), as in
// pages where each head's keys and values are side by side: v then begins dim elements after k.
// Heads of v, and so those of out, may have another number of features than those of q and k
// (v-dim), as the expanded form of latent attention has. k and v may be e4m3 with scales
// (common/cache_format.hpp); a gradient has no such form.
//
// The packed mask has a bit for each pair, bit j % 32 of word j / 32 of a row of mask_words()
// words. For each tile of 64 queries and 64 keys it has a flag: 0 no pair is allowed, 1 all are, 2
// some are. Bits of pairs that do not exist are 0, and do not count for a flag. The op pack-mask
// makes both.
//
// Backward, with the gradient d_out, and out and lse as the forward pass wrote them:
//   p_ij  = exp(x_ij - lse_i)           dv_j = sum_i p_ij d_out_i
//   D_i   = d_out_i · out_i             ds_ij = p_ij (d_out_i · v_j - D_i)
//   dq_i  = scale sum_j c_ij ds_ij k_j  dk_j = scale sum_i c_ij ds_ij q_i
//   d_sink = - sum_i exp(sink - lse_i) D_i
// Here c_ij = 1 - tanh² is the slope of the soft cap, and dk and dv also sum over the heads of q
// that share theirs. dk and dv of keys beyond a sequence's length are 0. There is no gradient of
// the bias.
//
// Sources: the online softmax, Milakov and Gimelshein 2018 (arXiv 1805.02867); blocks of keys
// without a matrix of scores in memory, Dao et al. 2022 (FlashAttention, arXiv 2205.14135); sinks,
// Xiao et al. 2023 (arXiv 2309.17453) in the form of gpt-oss.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "kernels/common/cache_format.hpp"
#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in op.cpp and pack_mask.cpp (pack_mask.hpp describes it); listed in kernels/catalog.cpp.
const Op& attention_op();
const Op& pack_mask_op();

namespace attention {

constexpr const char* stage_pack = "pack";

constexpr std::int64_t most_dim = 512;     // features of a head
constexpr std::int64_t most_heads = 1024;  // of q
constexpr std::int64_t mask_tile = 64;     // queries and keys of a flag

enum class Layout { bshd, thd };
enum class Mask { none, causal, boolean, packed };

/// The pairs of a mask in test data: half of them at random, sequences that are documents of unlike
/// lengths without and with causality, keys from the query's place on, all, none.
enum class MaskData { random, documents, causal_documents, upper, all, none };

/// Words of 32 bits in a row of a packed mask: whole 16 bytes.
constexpr std::int64_t mask_words(std::int64_t kv) {
  return (kv + 127) / 128 * 4;
}

/// A problem's sizes and options, read once.
struct Layer {
  std::int64_t b = 0;         // sequences
  std::int64_t s = 0;         // queries of a sequence; in thd of all together
  std::int64_t kv = 0;        // keys of a sequence; in thd of all together, unless they are paged
  std::int64_t heads = 0;     // of q
  std::int64_t kv_heads = 0;  // of k and v
  std::int64_t dim = 0;       // features of a head of q and k
  std::int64_t v_dim = 0;     // of v and out
  std::int64_t window = 0;    // 0: none
  std::int64_t page = 0;      // keys of a page; 0: not paged
  std::int64_t pages = 0;     // of the cache
  std::int64_t q_row = 0;     // elements from a token to the next
  std::int64_t k_row = 0;
  std::int64_t v_row = 0;
  std::int64_t kv_head = 0;  // elements from a head of k to the next
  std::int64_t v_head = 0;   // the same of v
  Layout layout = Layout::bshd;
  Mask mask = Mask::none;
  MaskData mask_data = MaskData::random;
  bool mask_of_head = false;  // each head of q has a mask of its own
  bool bias = false;
  bool bias_of_head = false;      // each head of q has a bias of its own
  bool bias_of_sequence = false;  // each sequence has
  bool kv_offsets = false;        // thd: keys have offsets of their own
  bool lengths = false;
  bool sinks = false;
  bool lse = false;  // forward: it is written
  bool backward = false;
  bool deterministic = false;    // backward: equal bits in every run
  bool batch_invariant = false;  // forward: a row's bits do not depend on the other rows
  float softcap = 0;             // 0: none
  float scale = 0;
  CacheFormat cache_format = {};  // of k and v
  DType dtype = DType::f32;

  DType kv_dtype() const { return cache_format.dtype(dtype); }
  std::int64_t q_tokens() const { return layout == Layout::thd ? s : b * s; }
  /// Rows of k and v in memory.
  std::int64_t kv_tokens() const {
    if (page > 0) return pages * page;
    return layout == Layout::thd ? kv : b * kv;
  }
  std::int64_t group() const { return heads / kv_heads; }
  std::int64_t pages_of_sequence() const { return (kv + page - 1) / page; }
  /// The most keys that a sequence of test data has: kv, or where sequences of that length do not
  /// fit in the pages together, its share of those.
  std::int64_t usual_kv() const {
    if (page == 0 || !lengths) return kv;
    return std::min(kv, std::max<std::int64_t>(pages * page / b, 1));
  }
  std::int64_t mask_heads() const { return mask_of_head ? heads : 1; }
  bool masked() const { return mask == Mask::boolean || mask == Mask::packed; }
  /// The first element of a bias matrix [s, kv].
  std::int64_t bias_at(std::int64_t sequence, std::int64_t head) const {
    const std::int64_t heads_of_bias = bias_of_head ? heads : 1;
    return ((bias_of_sequence ? sequence : 0) * heads_of_bias + (bias_of_head ? head : 0)) * s * kv;
  }
  /// The first row of a mask, of s rows.
  std::int64_t mask_row(std::int64_t sequence, std::int64_t head) const {
    return (sequence * mask_heads() + (mask_of_head ? head : 0)) * s;
  }
  /// The first query's place in lse: [b, heads, s], thd: [heads, s].
  std::int64_t lse_at(std::int64_t sequence, std::int64_t head) const {
    return (layout == Layout::thd ? head : sequence * heads + head) * s;
  }
};
Layer layer_of(const Problem& problem);

/// Places of the op's tensors, by name; `absent` if the problem has no such tensor.
struct Places {
  std::size_t d_out = absent, q = absent, k = absent, v = absent, out = absent, lse = absent;
  std::size_t pages = absent;       // i32 [b, ceil(kv / page)]
  std::size_t mask = absent;        // u8 [b, 1 | heads, s, kv]
  std::size_t mask_bits = absent;   // i32 [b, 1 | heads, s, mask_words(kv)]
  std::size_t mask_flags = absent;  // u8 [b, 1 | heads, ceil(s / 64), ceil(kv / 64)]
  std::size_t bias = absent;        // [1 | b, 1 | heads, s, kv], the op's dtype
  std::size_t offsets = absent;     // i32 [b + 1]
  std::size_t kv_offsets = absent;  // i32 [b + 1]
  std::size_t lengths = absent;     // i32 [b]
  std::size_t sinks = absent;       // f32 [heads]
  std::size_t k_scale = absent;     // f32 [1 | kv_heads]
  std::size_t v_scale = absent;     // the same
  std::size_t dq = absent, dk = absent, dv = absent;  // as q, k, v, in rows of their own
  std::size_t d_sinks = absent;                       // f32 [heads]
  std::size_t count = 0;
};
Places places_of(const Problem& problem);

/// The definition in float64, of either pass.
void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel);

/// The families of both passes; engine.hpp describes their parts.
std::vector<const Family*> families();

}  // namespace attention
}  // namespace fftune
