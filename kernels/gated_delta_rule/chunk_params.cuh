// The parameters of the kernels of gated-delta-rule that take chunks of 64 tokens. Included by host
// and device code.
//
// Chunk c of sequence i has the slot floor(first / 64) + i + c, where `first` is the row of the
// sequence's first token: no two chunks have one slot, and there are at most floor(tokens / 64) +
// batch of them. Slots that no chunk has stay unwritten.
#pragma once

#include "gated_delta_rule/params.cuh"

namespace fftune {

constexpr int delta_chunk = 64;
// Floats of a chunk and value head: rows of 64 by these names, with G the running sum of g.
enum class delta_factor {
  held,   // beta exp(G) / |k|: of what the state holds for k
  read,   // scale exp(G) / |q|: of what it gives for q
  write,  // exp(G_last - G) / |k|: of delta
  beta,
  last,    // its first one: exp(G_last)
  sum,     // G log2(e)
  k_norm,  // 1 / |k|
  q_norm,  // scale / |q|
  count
};
constexpr int delta_chunk_factors = static_cast<int>(delta_factor::count) * delta_chunk;
constexpr int factor_at(delta_factor factor) {
  return static_cast<int>(factor) * delta_chunk;
}
constexpr int delta_image_bytes = 2 * delta_chunk * 128;  // inverse, read

struct delta_chunk_params {
  delta_rule_params layer;
  void* images;  // [slots, v_heads, 2, 64, 64] bf16, each a K-major tile under the 128-byte swizzle
  float* factors;  // [slots, v_heads, delta_chunk_factors]
  // For a backward pass: of each chunk and value head the state before it [v_dim, dim], and delta
  // [64, v_dim], as tiles of 64 rows and 64 columns in bf16 under the 128-byte swizzle.
  void* states;
  void* deltas;
  // Of each sequence, value head and segment but the last: B [v_dim, dim], then A [dim, dim].
  float* transfers;
  tensor_map q;  // [tokens, q_row], boxes of 64 tokens and 64 features
  tensor_map k;
  tensor_map v;      // boxes of 64 tokens and 64 features
  tensor_map d_out;  // [tokens, v_heads * v_dim], as v
};

struct delta_chunk_backward_params {
  delta_chunk_params chunk;
  delta_backward_params back;  // without its `forward`
  void* d_states;              // as states: the gradient of the state behind each chunk
  void* errors;                // as deltas: Y
};

struct delta_chunk_place {
  long long row;  // of the chunk's first token
  int tokens;     // of the chunk; none: no chunk has the slot
};

}  // namespace fftune
