// The entry point of the decode engine (kernel.cuh).
//
// Grid: (ceil(n / rows), split_k), with clusters of (1, split_k) where there are no split_counters.
// Block: config.threads(). Shared memory: config.shared_bytes(form).
#include "gemm/decode/kernel.cuh"

namespace fftune {

template <gemm_form form, decode_config config>
__global__ void __launch_bounds__(config.threads())
    decode_gemm(const __grid_constant__ gemm_params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  decode_kernel<form, config>::run(p, shared_memory);
}

}  // namespace fftune
