// The one configuration of the simt attention, and the parameters of its backward. Included by host
// and device code.
#pragma once

#include "attention/form.cuh"
#include "attention/params.cuh"

namespace fftune {

struct attention_simt_config {
  static constexpr int warps = 4;  // of a CTA; each has a row of its own
  static constexpr int threads = warps * 32;
};

struct attention_simt_backward_params {
  attention_params forward;  // with d_out, dq, dk, dv, d_sinks and delta
  // Elements between sequences (bshd), and between tokens.
  long long d_out_batch, dq_batch, dk_batch, dv_batch;
  int d_out_row, dq_row, dk_row, dv_row;
};

}  // namespace fftune
