// Which state each sequence has (decode/decode.hpp): its own, or none where its step does not
// count.
//
//   find_states   a thread has a sequence
#include "common/async.cuh"
#include "layer/next_token.cuh"

namespace fftune {

constexpr int states_threads = 128;

__global__ void __launch_bounds__(states_threads)
    find_states(const int* lengths, const int* ended, int* indices, int batch, int cache) {
  wait_and_launch_dependents();
  const int row = static_cast<int>(blockIdx.x) * states_threads + static_cast<int>(threadIdx.x);
  if (row < batch) indices[row] = goes_on(ended[row], lengths[row], cache) ? row : -1;
}

}  // namespace fftune
