// Configuration and parameters of the persistent form of layers (layer/persistent.cu). Included by
// host and device code.
#pragma once

#include "common/group_memory.cuh"
#include "gemm/decode/packed_stage_shape.cuh"
#include "gemm/decode/stream_shape.cuh"
#include "gemm/form.cuh"

namespace fftune {

/// In the order of moe_route::Score.
enum class persistent_score : int { softmax_of_all, softmax_of_chosen, sigmoid };

struct persistent_config {
  int tokens = 1;        // new tokens of all sequences: 1 to 8
  int per_sequence = 1;  // new tokens of a sequence; each sees the keys up to its own
  int d = 0, h = 0, heads = 0, kv_heads = 0, dim = 0;
  int rotary = 0;               // features of a head that are rotated, the first ones
  int window = 0;               // keys that a query sees at most; 0: all
  int blocks = 0;               // as many as there are SMs
  int warps = 8;                // that multiply; kv_heads divides them
  int chunk = 512;              // elements of k of a stage
  int stages = 0;               // of the pipeline
  int least_keys = 16;          // of a split of a sequence's keys
  int in_flight = 4;            // stages that are being copied at most
  int attention_in_flight = 1;  // while attention goes on
  int input_limit = 36 * 1024;  // bytes of activations in shared memory, about
  bool bias = false, head_norms = false, rotates = true, wide_slots = false;
  bool packed_qkv = false;  // w_qkv has the rows of q, k and v
  int page = 0;             // keys of a page of the caches; 0: contiguous
  int kv_head = 0;          // elements from a head of the caches to the next
  int head_groups = 1;      // attention of a CTA has one of so many groups of neighbouring heads
  int held = 0;             // stages of a product that wait in registers for its activations
  int ahead = 0;            // bytes of later dense weights, of each of two, that a CTA has in L2
  bool sinks = false, out_bias = false;
  bool caps_scores = false;
  bool scales_residual = false;  // what is added to the residual stream is multiplied by a vector
  // Norms behind attention and the feed-forward network. Every CTA has the whole residual stream,
  // because it knows a norm when all of its input is there.
  bool post_norms = false;
  int experts = 0;        // of a mixture, whose intermediate size is h; 0: one dense network
  int choices = 0;        // experts of a token, which its router chooses
  int shared = 0;         // and those that every token has, the last ones of the weights
  int own = 0;            // and parts of a network of all tokens, of h features each
  bool own_gate = false;  // whose weight is the sigmoid of a product
  persistent_score score = persistent_score::softmax_of_all;
  bool renormalises = false, router_bias = false, choice_bias = false;
  bool rounds_logits = true;    // to the type of x
  bool packed_gate_up = false;  // rows of gate, then those of up, of each expert
  bool interleaved = false;     // or a row of each in turn
  bool expert_bias = false;
  int vocab = 0;  // of a whole token: ids are embedded, and the next ones chosen; 0: layers alone
  bool draws = false, sums = false;  // of its choice (choice_form)
  bool head_bias = false, rounds_head = false, caps_head = false;
  int ranks = 0;  // of a group, each with its slice of heads and of h; 0: there is none
  // Packed weights: those of q, k, v and the output product, those between mid and y, and the head.
  bool packs_attention = false, packs_network = false;
  packed_form format = {};
  bool packs_head = false;
  packed_form head_format = {};

  static constexpr int block_rows = 16;    // of a stage, and of an MMA
  static constexpr int copies_of_set = 3;  // sets of buffers between blocks, one for a layer
  // Neighbouring rows begin 16 banks apart for 16-byte reads of two rows at once, and 4 banks apart
  // for ldmatrix.
  static constexpr int row_padding = 64, value_padding = 16;

  constexpr int up(int value, int by) const { return (value + by - 1) / by; }
  constexpr int q_rows() const { return heads * dim; }
  constexpr int kv_rows() const { return kv_heads * dim; }
  constexpr int cache_row() const { return kv_heads * kv_head; }
  constexpr int qkv_rows() const { return q_rows() + 2 * kv_rows(); }
  constexpr int consumers() const { return 32 * warps; }
  // The last warpgroup has two working warps; it is whole because registers are reallocated by
  // warpgroup.
  constexpr int threads() const { return consumers() + 128; }
  constexpr int other_registers() const {
    if (has_experts() && packs() && warps == 8) return ahead > 0 ? 128 : 112;
    return has_experts() || ranks > 0 || packs() ? warps == 8 ? 104 : 96 : ahead > 0 ? 72 : 56;
  }
  constexpr int consumer_registers() const {
    const int launched = 65536 / threads() / 8 * 8;
    const int left = (launched * threads() - 128 * other_registers()) / consumers() / 8 * 8;
    return left < 232 ? left : 232;
  }

  // Rows of a product, or features between up and down, that are one CTA's: a multiple of these.
  constexpr bool packs() const { return packs_attention || packs_network; }
  constexpr int attention_unit() const { return packs_attention ? packed_rows : 1; }
  constexpr int down_unit() const { return packs_network ? packed_rows : 1; }
  constexpr int hidden_unit() const { return packs_network ? packed_rows : has_experts() ? 8 : 1; }
  constexpr int head_unit() const { return packs_head ? packed_rows : 1; }
  constexpr int most_rows(int rows, int unit) const { return up(up(rows, unit), blocks) * unit; }
  // Whether a thread has the same element of the residual stream behind both parts of a layer.
  constexpr bool keeps_residual() const {
    return attention_unit() == down_unit() && !shares_tiles();
  }
  constexpr int most_residual_rows() const { return most_rows(d, packs() ? packed_rows : 1); }
  constexpr bool has_experts() const { return experts > 0; }
  // Whether L2 can take weights ahead: gate and up, or beside experts dense ones of the next layer.
  constexpr bool can_look_ahead() const { return !packs_attention || !has_experts(); }
  constexpr bool has_head() const { return vocab > 0; }
  // Experts of a token, and of all tokens; each of the latter is a slot. Tokens that choose the
  // same expert have a slot of it each.
  constexpr int of_token() const { return has_experts() ? choices + shared + own : 1; }
  constexpr int slots() const { return tokens * of_token(); }
  // Rows of the router, and behind them that of the gate of the network of all tokens.
  constexpr int router_rows() const { return has_experts() ? experts + (own_gate ? 1 : 0) : 0; }
  // Down of packed experts is a part of each slot for each tile of 16 rows. Where whole tiles would
  // leave many CTAs with few, the parts are shared out in their order. A CTA then begins with the
  // last parts of a tile that it does not own, and hands their sums to the CTA before it.
  constexpr int down_parts() const { return d / packed_rows * slots(); }
  constexpr bool shares_tiles() const {
    return tokens == 1 && packs_network && has_experts() && down_parts() / blocks >= slots() - 1 &&
           7 * up(d / packed_rows, blocks) * slots() > 8 * up(down_parts(), blocks);
  }
  // Where CTA `block`'s parts begin, and the rows of the tiles that it owns: those whose first part
  // is the CTA's.
  constexpr int first_part(int block) const {
    return shares_tiles() ? down_parts() * block / blocks
                          : d / packed_rows * block / blocks * slots();
  }
  constexpr int first_owned_row(int block) const {
    return up(first_part(block), slots()) * packed_rows;
  }
  // Features between gate and down, of a token, and those that are shared out among CTAs: with
  // experts of all slots.
  constexpr int hidden() const { return of_token() * h; }
  constexpr int all_hidden() const { return has_experts() ? slots() * h : h; }
  // Blocks of 16 rows of weights that a CTA multiplies at most.
  constexpr int most_blocks() const {
    const int of[] = {up(most_rows(qkv_rows(), attention_unit()), 16),
                      up(most_residual_rows(), 16) + (shares_tiles() ? 1 : 0),
                      up(most_rows(all_hidden(), hidden_unit()), 8)};
    return of[0] > of[2] ? (of[0] > of[1] ? of[0] : of[1]) : (of[1] > of[2] ? of[1] : of[2]);
  }
  // Results that a thread has of a product, at most.
  constexpr int own_qkv() const {
    return up(most_rows(qkv_rows(), attention_unit()) * tokens, consumers());
  }
  constexpr int own_hidden() const {
    return up(most_rows(all_hidden(), hidden_unit()), consumers());
  }
  // Biases of them: of down one for each choice.
  constexpr bool has_biases() const { return bias || out_bias || router_bias || expert_bias; }
  constexpr int own_biases() const {
    const int of_choices = choices + shared, hidden = 2 * own_hidden();
    const int of_experts = !expert_bias ? 1 : of_choices > hidden ? of_choices : hidden;
    return bias && own_qkv() > of_experts ? own_qkv() : of_experts;
  }
  // Likewise their tiles of gate and of up, which go in turn: a CTA may begin with the up of a pair
  // that the one before owns.
  constexpr int gate_up_tiles() const { return 2 * (all_hidden() / packed_rows); }
  constexpr bool shares_pairs() const {
    return tokens == 1 && packs_network && has_experts() && gate_up_tiles() >= 2 * blocks &&
           40 * up(gate_up_tiles() / 2, blocks) > 21 * up(gate_up_tiles(), blocks);
  }
  constexpr int first_gate_up(int block) const {
    return shares_pairs() ? gate_up_tiles() * block / blocks
                          : gate_up_tiles() / 2 * block / blocks * 2;
  }
  constexpr int first_owned_hidden(int block) const {
    return up(first_gate_up(block), 2) * packed_rows;
  }
  // Elements of a token's activations that are in shared memory at a time: all that are normalised,
  // and all of experts.
  constexpr int input_length() const {
    const int widest = hidden() > q_rows() ? hidden() : q_rows();
    const int longest = widest > d ? widest : d;
    const int unit = packs() || packs_head ? most_packed_group : chunk;
    const int fit = input_limit / (2 * tokens) / unit * unit;
    const int least = up(d, unit) * unit, most = up(longest, unit) * unit;
    return has_experts() ? most : fit < least ? least : fit < most ? fit : most;
  }

  // Whether the next part of a product's activations is asked for while the MMAs of one run. On an
  // H100 it makes 16 layers of Llama-3.2-1B with four tokens 794 us instead of 803, and with eight
  // 1,024 instead of 977: the words take 32 registers.
  static constexpr int most_requested_tokens = 5;
  constexpr bool requests() const {
    return tokens > 1 && tokens <= most_requested_tokens && !has_experts() && !packs() &&
           (input_length() < hidden() || input_length() < q_rows());
  }

  // Attention: each CTA has one split of the keys of one sequence, for a group of heads. A warp has
  // a kv head, and as many warps as there are of them every groups()-th block of 16 keys. Its
  // queries are those of the sequence's tokens, token by token; 8 are the columns of an MMA.
  constexpr int sequences() const { return tokens / per_sequence; }
  constexpr int own_heads() const { return heads / head_groups; }
  constexpr int own_kv_heads() const { return kv_heads / head_groups; }
  constexpr int own_kv_rows() const { return own_kv_heads() * dim; }
  constexpr int splits() const { return blocks / (sequences() * head_groups); }
  constexpr int groups() const { return warps / own_kv_heads(); }
  constexpr int group_heads() const { return heads / kv_heads; }
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
  // The first key of a sequence of `length` keys that its new tokens may see, rounded down to whole
  // stages.
  constexpr int first_seen(int length) const {
    const int first = length - per_sequence + 1 - window;
    return window == 0 || first <= 0 ? 0 : first / 16 * 16;
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

  static constexpr int weight_bytes(int elements) { return 2 * elements; }

  // A stage of packed weights: blocks of 16 rows and 64 elements of k, with as many codes as a
  // stage of dense weights has bytes, and the scales.
  static constexpr int most_packed_group = 128;
  constexpr int packed_blocks(packed_form of) const {
    return block_rows * weight_bytes(chunk) / (packed_part_bytes * of.parts());
  }
  constexpr packed_stage_shape packed_stage(packed_form of) const {
    return {of, packed_blocks(of)};
  }
  // Stages in flight that have as many bytes as `in_flight` full ones, of experts' rows of `k`: the
  // last stage of each row is partly empty.
  constexpr int in_flight_of(int k) const {
    const int k_blocks = up(k, packed_k), stage = packed_blocks(format);
    const int wanted = up(in_flight * up(k_blocks, stage) * stage, k_blocks);
    return wanted < stages ? wanted : stages;
  }

  // Shared memory, in its order.
  constexpr int token_columns() const { return tokens == 1 ? 1 : up(tokens, 2) * 2; }
  constexpr int stage_bytes() const {
    int bytes = block_rows * (weight_bytes(chunk) + row_padding);
    if (packs() && packed_stage(format).bytes() > bytes) bytes = packed_stage(format).bytes();
    if (packs_head && packed_stage(head_format).bytes() > bytes)
      bytes = packed_stage(head_format).bytes();
    return up(bytes, 128) * 128;
  }
  constexpr int barrier_bytes() const { return up(16 * stages, 128) * 128; }
  // Packed weights take tokens by ldmatrix.
  constexpr int input_stride() const {
    return 2 * input_length() + (packs() ? value_padding : row_padding);
  }
  constexpr int query_stride() const { return 2 * dim + row_padding; }
  constexpr int sums_stride() const { return 16 * token_columns() * 4; }  // of a warp and a block
  constexpr int sums_bytes() const { return most_blocks() * warps * sums_stride(); }
  constexpr int combine_bytes() const { return combined_rows() * unit_threads() * 24; }
  constexpr int input_at() const { return barrier_bytes() + stages * stage_bytes(); }
  // The heads of q, then those of the new k and v, take the place of the activations.
  constexpr int queries_at() const { return input_at(); }
  constexpr int new_rows_at() const {
    return queries_at() + per_sequence * own_heads() * query_stride();
  }
  constexpr int input_bytes() const {
    const int of_heads = per_sequence * (own_heads() * query_stride() + 4 * own_kv_rows());
    const int of_input = tokens * input_stride();
    return of_heads > of_input ? of_heads : of_input;
  }
  // Weights of a norm, and in front of them those of the one behind the product before, and the
  // residual stream.
  constexpr int residual_at() const { return input_at() + input_bytes(); }
  constexpr int residual_stride() const { return post_norms ? 2 * d : 0; }
  constexpr int post_norm_at() const { return residual_at() + tokens * residual_stride(); }
  constexpr int norm_at() const { return post_norm_at() + residual_stride(); }
  constexpr int sums_at() const { return norm_at() + 2 * d; }
  constexpr int combine_at() const { return sums_at() + sums_bytes(); }
  constexpr int statistics_at() const { return combine_at() + combine_bytes(); }
  constexpr int slots_at() const { return statistics_at() + 4 * 32; }  // of the new tokens
  constexpr int turns_at() const { return slots_at() + 8 * 8; }        // cosines and sines
  constexpr int choices_at() const {
    return turns_at() + (rotates ? 4 * per_sequence * rotary : 0);
  }
  constexpr int weights_at() const { return choices_at() + (has_experts() ? 4 * slots() : 0); }
  constexpr int shared_bytes() const { return weights_at() + (has_experts() ? 4 * slots() : 0); }

  // The buffers between blocks of one layer, in bytes.
  constexpr long long aligned(long long bytes) const { return (bytes + 255) / 256 * 256; }
  constexpr long long partial_at() const { return aligned(4ll * tokens * qkv_rows()); }
  constexpr long long logs_at(int cache) const {
    return partial_at() + aligned(4ll * tokens * parts(cache) * q_rows());
  }
  constexpr long long attended_at(int cache) const {
    return logs_at(cache) + aligned(4ll * tokens * parts(cache) * heads);
  }
  constexpr long long mid_at(int cache) const {
    return attended_at(cache) + aligned(2ll * tokens * q_rows());
  }
  constexpr long long hidden_at(int cache) const {
    return mid_at(cache) + aligned(2ll * tokens * d);
  }
  constexpr long long y_at(int cache) const {
    return hidden_at(cache) + aligned(2ll * tokens * hidden());
  }
  constexpr long long router_at(int cache) const { return y_at(cache) + aligned(2ll * tokens * d); }
  constexpr long long handed_at(int cache) const {
    return router_at(cache) + aligned(4ll * tokens * router_rows());
  }
  constexpr long long handed_ups_at(int cache) const {
    return handed_at(cache) + (shares_tiles() ? aligned(4ll * d) : 0);
  }
  constexpr long long set_bytes(int cache) const {
    return handed_ups_at(cache) + (shares_pairs() ? aligned(4ll * all_hidden()) : 0);
  }
  // Behind the sets: parts of a choice [CTAs, tokens].
  static constexpr int part_bytes = 48;
  constexpr long long parts_bytes() const { return 1ll * blocks * tokens * part_bytes; }
};

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
