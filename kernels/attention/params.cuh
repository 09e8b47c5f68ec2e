// The parameters of an attention kernel: one struct, passed by value. Included by host and device
// code. The host writes fields by their offsets and leaves those that a form does not use.
#pragma once

namespace fftune {

struct attention_params {
  const void* q;  // [batch, q_len, heads, dim]; thd: [q_len, heads, dim]
  const void* k;  // [batch, kv_len, kv_heads, dim]; paged: [pages, page, kv_heads, dim]
  const void* v;  // as k
  void* out;      // as q; the backward reads it
  float* lse;     // f32 [batch, heads, q_len]; thd: [heads, q_len]; natural logarithm

  const unsigned* mask_bits;        // [batch, mask_heads, q_len, attention_mask_words(kv_len)]
  const unsigned char* mask_flags;  // [batch, mask_heads, ceil(q_len/64), ceil(kv_len/64)]
  const void* bias;                 // rows of bias_row elements
  const int* offsets;               // i32 [batch + 1], thd: where each sequence's queries begin
  const int* kv_offsets;            // the same of keys; equal to offsets where they are the same
  const int* lengths;               // i32 [batch]
  const int* pages;    // i32 [batch, ceil(kv_len / page)]; outside [0, page_count): a page of zeros
  const float* sinks;  // f32 [heads]

  // Backward.
  const void* d_out;
  void* dq;
  void* dk;
  void* dv;
  float* d_sinks;
  float* delta;        // f32 as lse: sums of d_out * out over a row
  float* dq_partials;  // f32: dq before its conversion

  // Decode: work is divided among gridDim.y groups of CTAs (decode/config.cuh).
  unsigned char* partials;  // [groups, 2, CTAs of a group, rows, dim / 2 + 1] flagged words

  // Elements between tokens, and between sequences (bshd). Heads are dim elements apart, those of k
  // and v kv_head.
  long long q_batch, k_batch, v_batch, out_batch;
  int q_row, k_row, v_row, out_row;
  int kv_head;
  // Elements of bias between heads and between sequences: 0 where they share it.
  long long bias_head, bias_batch;
  int bias_row;

  int batch, heads, kv_heads;
  int q_len, kv_len;  // thd: tokens of all sequences together
  int mask_heads;     // 1 or heads
  int window;         // keys that a query sees at most, its own included
  int page;           // tokens of a page
  int page_count;     // of k and v
  int group;          // scheduling: heads whose keys and values stay in L2 together
  float scale;        // of scores, before the soft cap
  float softcap;
};

// Parameters of kernels that read k and v of e4m3.
struct attention_cache_params {
  attention_params attention;
  const float* k_scale;  // f32, of the tensor or of each of its heads
  const float* v_scale;
  int scale_of_head;  // 1: each head has its own
};

// Parameters of backward kernels that know their tensors by strides.
struct attention_backward_params {
  attention_params forward;  // with d_out, dq, dk, dv, d_sinks and delta
  // Elements between sequences (bshd), and between tokens.
  long long d_out_batch, dq_batch, dk_batch, dv_batch;
  int d_out_row, dq_row, dk_row, dv_row;
};

}  // namespace fftune
