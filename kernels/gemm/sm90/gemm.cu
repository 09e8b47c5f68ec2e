// The sm_90a GEMM: the one entry point of every form. See kernel.cuh.
#include "gemm/sm90/kernel.cuh"

namespace fftune {

template <gemm_form form, sm90_config config>
__global__ void __launch_bounds__(sm90_plan_of(form, config).threads,
                                  sm90_plan_of(form, config).ctas_per_sm)
    gemm_sm90(const __grid_constant__ sm90_params params) {
  extern __shared__ unsigned char shared_memory[];
  gemm_kernel<sm90_traits<form, config>>::run(params, shared_memory);
}

}  // namespace fftune
