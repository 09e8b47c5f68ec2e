// The compile-time form of an attention problem: the facts that kernels are specialised for.
// Kernels take it as one template argument, which the host prints. Included by host and device
// code.
#pragma once

#include "gemm/form.cuh"

namespace fftune {

enum class attention_layout {
  bshd,  // [batch, tokens, heads, dim]: sequences of one length
  thd,   // [tokens, heads, dim]: sequences of any lengths, packed; offsets say where each begins
};

enum class attention_mask {
  none,
  causal,  // aligned at the bottom right: query i sees keys j <= i + (kv_len - q_len)
  packed,  // bits, with flags of 64 x 64 tiles: empty, full, mixed (the op pack-mask)
};

struct attention_form {
  element type = element::bf16;  // of q, k, v, out and bias
  int dim = 128;                 // of a head
  attention_layout layout = attention_layout::bshd;
  attention_mask mask = attention_mask::none;
  /// Query i sees keys j > i + (kv_len - q_len) - window, beside what the mask says.
  bool window = false;
  bool bias = false;           // added to the scaled, soft-capped scores
  bool lengths = false;        // valid keys of each sequence, in memory
  bool paged = false;          // k and v lie in pages, which a table lists for each sequence
  bool sinks = false;          // a logit of each head in the softmax's denominator
  bool softcap = false;        // softcap * tanh(scaled score / softcap)
  bool lse = false;            // the forward stores the log-sum-exp of each row
  bool deterministic = false;  // backward: dq is summed in a fixed order
  bool e4m3 = false;           // forward: k and v, with scales (attention_cache_params)

  constexpr bool packed_sequences() const { return layout == attention_layout::thd; }
  /// Whether keys beyond a sequence's own may follow it in memory, where they can hold anything:
  /// NaN, too, which a probability of zero does not cancel.
  constexpr bool foreign_keys() const { return packed_sequences() || lengths || paged; }
};

/// Tile flags of a packed mask.
enum attention_tile_flag : unsigned char { tile_empty = 0, tile_full = 1, tile_mixed = 2 };
/// Rows and columns of a flag's tile.
constexpr int attention_flag_tile = 64;

/// Words of a row of mask bits: rows begin at multiples of 16 bytes.
constexpr int attention_mask_words(int kv_len) {
  return (kv_len + 127) / 128 * 4;
}

}  // namespace fftune
