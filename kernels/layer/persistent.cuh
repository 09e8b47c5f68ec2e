// Configuration of the persistent form of layers (layer/persistent.cu). Included by host and device
// code. Each part is in a file of its subject, and knows those before it:
//
//   form.cuh     model, mixture, vocabulary, packing, tuning: the fields
//   shares.cuh   rows of each product that are one CTA's
//   split.cuh    keys of attention that are one CTA's
//   layout.cuh   registers and shared memory of a CTA
//   buffers.cuh  memory between CTAs
#pragma once

#include "layer/persistent/buffers.cuh"
#include "layer/persistent/parameters.cuh"

namespace fftune {

struct persistent_config : persistent_buffers {
  constexpr persistent_config(const persistent_model& model = {},
                              const persistent_mixture& mixture = {},
                              const persistent_vocabulary& vocabulary = {},
                              const persistent_packing& packing = {},
                              const persistent_tuning& tuning = {})
      : persistent_buffers{{{{{model, mixture, vocabulary, packing, tuning}}}}} {}
};

}  // namespace fftune
