// Parameters of a launch of layer/persistent.cu. Included by host and device code.
#pragma once

#include "common/group_memory.cuh"

namespace fftune {

struct persistent_layer_pointers {
  const void *attn_norm, *ffn_norm;
  const void *attn_post_norm, *ffn_post_norm;
  const void* qkv[3];   // the first alone if they are packed
  const void* bias[3];  // likewise
  const void* head_norms[2];
  const void *out, *gate, *up, *down;
  const void* out_bias;
  const float* sinks;           // [heads]
  const float* residual_scale;  // [d]
  void *keys, *values;  // caches [batch, cache, kv_heads, dim] or [pages, page, kv_heads, dim]
};

struct persistent_router_pointers {
  const void *weights, *bias, *choice_bias;
  const void *gate_bias, *up_bias, *down_bias;  // of experts; with packed rows the first alone
  const void *own_gate, *own_up, *own_down;     // of a network of all tokens
  const void* own_weight;                       // a row whose product weights it
};
// With experts the matrices of gate, up and down are those of all experts.
struct persistent_expert_layer {
  persistent_layer_pointers layer;
  persistent_router_pointers router;
};

// Packed weights have their codes where dense ones are.
struct persistent_packed_pointers {
  enum : int { qkv, out, gate, up, down, own_gate, own_up, own_down, count };
  const void* scales[count];
  const unsigned char* zeros[count];
};
struct persistent_packed_layer {
  persistent_layer_pointers layer;
  persistent_packed_pointers packed;
};
struct persistent_packed_expert_layer {
  persistent_layer_pointers layer;
  persistent_router_pointers router;
  persistent_packed_pointers packed;
};

struct persistent_common {
  static constexpr int most_pairs = 128;

  const void* x;  // [tokens, d]
  void* y;
  const int* positions;  // [tokens]
  const float* angles;   // null: from frequencies
  const void* slots;     // [tokens]
  const int* lengths;    // [sequences]
  const int* pages;      // [sequences, ceil(cache / page)]; one that is not in memory is zeros
  void* workspace;       // copies_of_set sets of zeros
  long long cache_rows;  // of a layer's cache; a slot beyond them is of no row
  int layers, cache, page_count, table_rows;
  float epsilon, norm_offset;  // of the norms of heads
  float scale;                 // of scores, times log2(e); of capped ones the cap is
  float inner_scale;           // and this is their scale divided by the cap
  float angle_scale;
  float route_scale;  // of the experts' weights
  float frequencies[most_pairs];
};

// A whole token (decode/decode.hpp): its ids, the state of the sequences, and the head. Where
// there are several launches, the first embeds, and the last one chooses.
struct persistent_token {
  const int *ids, *ended;
  const void* embedding;  // [vocab, d]; null: x is there
  const void *final_norm, *head, *head_bias;
  const void* head_scales;
  const unsigned char* head_zeros;
  const float* temperature;
  const long long* seeds;
  int *next_ids, *next_lengths, *steps, *next_ended, *out;
  const int *limits, *stop;
  int* chosen;
  float *logit, *logprob;
  float embed_scale, softcap;
  int stops, room, pad;
  int chooses;  // 0: there are layers behind these
};

struct persistent_ranks {
  group_table loopback;      // where there is no table: of a rank that plays its peers
  const group_table* table;  // the rank's own memory, or null
  u32 tag;                   // of the problem and the variant
};
struct persistent_rank_common : persistent_common, persistent_ranks {};
static_assert(sizeof(persistent_rank_common) ==
              sizeof(persistent_common) + sizeof(persistent_ranks));

// Parameters of a kernel have 32,764 bytes since CUDA 12.1.
template <class Layer, int count, class Common = persistent_common>
struct persistent_params_of : Common {
  static constexpr int most_layers = count;
  persistent_token token;
  Layer of[count];
};
using persistent_params = persistent_params_of<persistent_layer_pointers, 48>;
using persistent_expert_params = persistent_params_of<persistent_expert_layer, 48>;
using persistent_rank_params =
    persistent_params_of<persistent_layer_pointers, 48, persistent_rank_common>;
using persistent_packed_params = persistent_params_of<persistent_packed_layer, 48>;
using persistent_packed_expert_params = persistent_params_of<persistent_packed_expert_layer, 48>;
static_assert(sizeof(persistent_rank_params) <= 32764 &&
              sizeof(persistent_packed_expert_params) <= 32764);

}  // namespace fftune
