// What the layers of a launch are, and how they run: the fields of the configuration, by subject.
// Included by host and device code.
#pragma once

#include "gemm/form.cuh"

namespace fftune {

/// In the order of moe_route::Score.
enum class persistent_score : int { softmax_of_all, softmax_of_chosen, sigmoid };

// Tokens, attention and the residual stream.
struct persistent_model {
  int tokens = 1;        // new tokens of all sequences: 1 to 8
  int per_sequence = 1;  // new tokens of a sequence; each sees the keys up to its own
  int d = 0, h = 0, heads = 0, kv_heads = 0, dim = 0;
  int rotary = 0;   // features of a head that are rotated, the first ones
  int window = 0;   // keys that a query sees at most; 0: all
  int page = 0;     // keys of a page of the caches; 0: contiguous
  int kv_head = 0;  // elements from a head of the caches to the next
  int ranks = 0;    // of a group, each with its slice of heads and of h; 0: there is none
  bool bias = false, head_norms = false, rotates = true, wide_slots = false;
  bool packed_qkv = false;  // w_qkv has the rows of q, k and v
  bool sinks = false, out_bias = false;
  bool caps_scores = false;
  bool scales_residual = false;  // what is added to the residual stream is multiplied by a vector
  // Norms behind attention and the feed-forward network. Every CTA has the whole residual stream,
  // because it knows a norm when all of its input is there.
  bool post_norms = false;

  constexpr int up(int value, int by) const { return (value + by - 1) / by; }
  constexpr int q_rows() const { return heads * dim; }
  constexpr int kv_rows() const { return kv_heads * dim; }
  constexpr int cache_row() const { return kv_heads * kv_head; }
  constexpr int qkv_rows() const { return q_rows() + 2 * kv_rows(); }
  constexpr int group_heads() const { return heads / kv_heads; }
  constexpr int sequences() const { return tokens / per_sequence; }
  // The first key of a sequence of `length` keys that its new tokens may see, rounded down to whole
  // stages.
  constexpr int first_seen(int length) const {
    const int first = length - per_sequence + 1 - window;
    return window == 0 || first <= 0 ? 0 : first / 16 * 16;
  }
};

// A mixture of experts, each of the intermediate size h.
struct persistent_mixture {
  int experts = 0;        // 0: one dense network
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

  constexpr bool has_experts() const { return experts > 0; }
  constexpr int of_token() const { return has_experts() ? choices + shared + own : 1; }
  // Rows of the router, and behind them that of the gate of the network of all tokens.
  constexpr int router_rows() const { return has_experts() ? experts + (own_gate ? 1 : 0) : 0; }
};

// Of a whole token: ids are embedded, and the next ones chosen (choice_form).
struct persistent_vocabulary {
  int vocab = 0;  // 0: layers alone
  bool draws = false, sums = false;
  bool head_bias = false, rounds_head = false, caps_head = false;

  constexpr bool has_head() const { return vocab > 0; }
};

// Packed weights: those of q, k, v and the output product, those between mid and y, and the head.
struct persistent_packing {
  bool packs_attention = false, packs_network = false;
  packed_form format = {};
  bool packs_head = false;
  packed_form head_format = {};

  constexpr bool packs() const { return packs_attention || packs_network; }
};

// What a search chooses, and what follows from the device.
struct persistent_tuning {
  int blocks = 0;               // as many as there are SMs
  int warps = 8;                // that multiply; kv_heads divides them
  int chunk = 512;              // elements of k of a stage
  int stages = 0;               // of the pipeline
  int least_keys = 16;          // of a split of a sequence's keys
  int in_flight = 4;            // stages that are being copied at most
  int attention_in_flight = 1;  // while attention goes on
  int input_limit = 36 * 1024;  // bytes of activations in shared memory, about
  int head_groups = 1;  // attention of a CTA has one of so many groups of neighbouring heads
  int held = 0;         // stages of a product that wait in registers for its activations
  int ahead = 0;        // bytes of later dense weights, of each of two, that a CTA has in L2

  constexpr int consumers() const { return 32 * warps; }
  // The last warpgroup has two working warps; it is whole because registers are reallocated by
  // warpgroup.
  constexpr int threads() const { return consumers() + 128; }
};

struct persistent_form : persistent_model,
                         persistent_mixture,
                         persistent_vocabulary,
                         persistent_packing,
                         persistent_tuning {};

}  // namespace fftune
