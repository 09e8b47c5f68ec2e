// The sm_90a attention backward, as three or four launches:
//
//   attention_backward_prepare  (query blocks, heads)  delta, lse in base 2; zeros to dq
//   attention_backward_sm90     key blocks x heads     dk and dv; adds to dq in f32
//   attention_backward_convert  (query blocks, heads)  dq
//   attention_backward_sinks    heads                  d_sinks, where the form has sinks
#include "attention/sm90/backward_kernel.cuh"
#include "attention/sm90/backward_rows.cuh"

namespace fftune {

template <attention_form form, sm90_backward_config config>
__global__ void __launch_bounds__(backward_row_threads)
    attention_backward_prepare(const __grid_constant__ sm90_backward_params params) {
  backward_preparation<form, config>::run(params);
}

template <attention_form form, sm90_backward_config config>
__global__ void __launch_bounds__(sm90_backward_plan_of(form, config).threads, 1)
    attention_backward_sm90(const __grid_constant__ sm90_backward_params params) {
  extern __shared__ unsigned char shared_memory[];
  attention_backward<form, config>::run(params, shared_memory);
}

template <attention_form form, sm90_backward_config config>
__global__ void __launch_bounds__(backward_row_threads)
    attention_backward_convert(const __grid_constant__ sm90_backward_params params) {
  backward_conversion<form, config>::run(params);
}

template <attention_form form, sm90_backward_config config>
__global__ void __launch_bounds__(backward_row_threads)
    attention_backward_sinks(const __grid_constant__ sm90_backward_params params) {
  sink_gradient(params);
}

}  // namespace fftune
