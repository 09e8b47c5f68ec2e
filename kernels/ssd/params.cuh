// The parameters and the form of the kernels of ssd (ssd.hpp), as parts of those of the gated delta
// rule: B is its k, C its q, x its v and dt its gate; a group is a head of q and k, a head one of
// v. Included by host and device code.
#pragma once

#include "gated_delta_rule/params.cuh"

namespace fftune {

// Compile-time parameters of the kernels.
struct ssd_form {
  element type = element::bf16;
  element state = element::f32;
  int dim = 64;
  int state_dim = 128;
  bool softplus = true;
  bool bias = false;
  bool skip = false;
  bool given = false;  // A, not A_log

  constexpr delta_rule_form states() const {
    return {.type = type, .state = state, .dim = state_dim, .v_dim = dim};
  }
};

struct ssd_params {
  delta_rule_params layer;  // A as A_log
  const float* D;           // [heads]
  float dt_min, dt_max;
};

struct ssd_backward_params {
  // dC as dq, dB as dk, dx as dv, ddt as d_gate, dA as dA_log. row_sums are of C, of B. gate_sums
  // [blocks, tokens, heads, 3]: the gradients of dt A, of dt in dt x, of D.
  delta_backward_params back;
  const float* D;
  float* dD;
  float dt_min, dt_max;
  // By chunks, bf16 [chunks, heads, dim, state_dim]: the states before each, and the gradients of
  // those behind it. Chunks are numbered as by first_slot() of gated_delta_rule/token.cuh.
  void* states;
  void* d_states;
};

}  // namespace fftune
