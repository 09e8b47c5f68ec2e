// The entry point of the sm80 engine (kernel.cuh).
//
// Grid: (work tiles, split_k), with clusters of (1, split_k) where there are no split_counters.
// Block: config.threads(). Shared memory: config.shared_bytes(form).
#include "common/dependency.cuh"
#include "gemm/sm80/kernel.cuh"

namespace fftune {

template <gemm_form form, sm80_config config>
__global__ void __launch_bounds__(config.threads())
    sm80_gemm(const __grid_constant__ gemm_params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  launch_dependents();
  wait_for_dependencies();
  sm80_kernel<form, config>::run(p, shared_memory);
}

}  // namespace fftune
