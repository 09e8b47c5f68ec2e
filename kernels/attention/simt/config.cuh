// The one configuration of the simt attention. Included by host
// and device code.
#pragma once

#include "attention/form.cuh"
#include "attention/params.cuh"

namespace fftune {

struct attention_simt_config {
  static constexpr int warps = 4;  // of a CTA; each has a row of its own
  static constexpr int threads = warps * 32;
};

using attention_simt_backward_params = attention_backward_params;

}  // namespace fftune
