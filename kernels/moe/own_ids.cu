// Ids of a rank's own experts from ids of all: id - first where that is in [0, own), else -1.
//
// Grid: (ceil(ids / 256)). Block: 256 threads.
#include "common/async.cuh"
#include "common/types.cuh"

namespace fftune {

__global__ void __launch_bounds__(256)
    find_own_ids(const int* ids, const int* first_expert, int* own_ids, int count, int own) {
  wait_and_launch_dependents();
  const int at = static_cast<int>(blockIdx.x) * 256 + static_cast<int>(threadIdx.x);
  if (at >= count) return;
  const i64 id = static_cast<i64>(ids[at]) - *first_expert;  // ids may be any numbers
  own_ids[at] = id >= 0 && id < own ? static_cast<int>(id) : -1;
}

}  // namespace fftune
