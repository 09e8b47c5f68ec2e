// The parameters and the form of the kernels of gated-delta-rule (gated_delta_rule.hpp). Included
// by host and device code. The host writes fields by their offsets and leaves those that a problem
// does not have.
#pragma once

#include "common/types.cuh"

namespace fftune {

enum class delta_gate { log, softplus, bounded };

// Compile-time parameters of the kernels.
struct delta_rule_form {
  element type = element::bf16;
  element state = element::f32;
  int dim = 128;
  int v_dim = 128;
  delta_gate gate = delta_gate::log;
  bool channels = false;   // a decay for each feature of k
  bool sigmoid = false;    // beta from its logits
  bool normed = false;     // l2 norm of q and k
  bool key_major = false;  // states [dim, v_dim]

  constexpr int decays() const { return channels ? dim : 1; }
};

struct delta_rule_params {
  const void* q;         // [tokens, heads, dim] with rows of q_row elements
  const void* k;         // as q
  const void* v;         // [tokens, v_heads, v_dim]
  const void* gate;      // g (f32) or a [tokens, v_heads, decays]
  const float* A_log;    // [v_heads]
  const float* dt_bias;  // [v_heads, decays]
  const void* beta;      // beta (f32) or its logits [tokens, v_heads]

  // States [.., v_heads, v_dim, dim], `state_block` elements apart. Each may be null.
  const void* state_in;
  void* state_out;
  const int* state_indices;        // [batch, slots], or [batch]; null: sequence i has state i
  const int* accepted;             // [batch], with slots; else null
  const unsigned char* has_state;  // [batch]
  const int* offsets;              // [batch + 1]; null: sequences of `tokens` tokens each

  void* out;  // [tokens, v_heads, v_dim]

  long long q_row, k_row, v_row, g_row, beta_row;
  long long state_block;
  int batch;
  int tokens;  // of a sequence, or with offsets of all of them
  int heads, v_heads;
  int gate_gap;  // elements between the gates, and the betas, of a head of k and the next one's
  int states;    // of the cache
  int slots;     // entries of a sequence; with `accepted`
  int null_index;
  float scale, beta_scale, gate_bound;
};

// Parameters of the backward kernels.
struct delta_backward_params {
  delta_rule_params forward;  // with initial_state as state_in
  const void* d_out;
  const float* d_final_state;
  void* dq;
  void* dk;
  void* dv;
  void* d_gate;  // dg (f32) or da
  float* dA_log;
  float* ddt_bias;
  void* d_beta;  // dbeta (f32) or dbeta_logits
  float* d_initial_state;
  float* checkpoints;  // [checkpoints, v_heads, v_dim, dim], or [dim, v_dim]
  float* history;      // [CTAs, chunk, elements of a lane, threads]
  float* row_sums;     // [blocks, tokens, v_heads, 2, dim]: of q, of k
  float* gate_sums;    // [blocks, tokens, v_heads, 1 + decays]: of beta, of g
  float* log_sums;     // [tokens, v_heads, decays]: the gradient of A_log, with decays
  long long all_tokens;
  int chunk;
};

// Where the tokens of a sequence are, and its state; `state` is -1 for padding.
struct delta_rule_sequence {
  int first, end;
  long long state;
};

}  // namespace fftune
