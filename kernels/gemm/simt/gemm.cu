// The entry point of the simt engine (kernel.cuh).
//
// Grid: work tiles, in one dimension because only that one may pass 65,535. Block: 256 threads.
#include "gemm/simt/kernel.cuh"

namespace fftune {

template <gemm_form form>
__global__ void __launch_bounds__(simt_config::threads)
    simt_gemm(const __grid_constant__ gemm_params p) {
  __shared__ typename simt_kernel<form>::storage shared;
  simt_kernel<form>::run(p, shared);
}

}  // namespace fftune
