// The sm_90a attention forward: the one entry point of every form. See forward.cuh.
#include "attention/sm90/forward.cuh"

namespace fftune {

template <attention_form form, attention_sm90_config config>
__global__ void __launch_bounds__(attention_sm90_plan_of(form, config).threads, config.ctas_per_sm)
    attention_forward_sm90(const __grid_constant__ attention_sm90_params params) {
  extern __shared__ unsigned char shared_memory[];
  attention_forward<attention_sm90_traits<form, config>>::run(params, shared_memory);
}

}  // namespace fftune
