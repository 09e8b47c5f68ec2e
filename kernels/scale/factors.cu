// y = factor[row]·x, or with ids y = factor[id]·x, where an id of no factor gives 0.
//
// x, ids and y are [m, h], of `elements` together, and y may be x. Grid: ceil(elements / 256).
// Block: 256.
#include "common/async.cuh"
#include "common/numerics.cuh"

namespace fftune {

template <class T, bool by_ids>
__global__ void __launch_bounds__(256)
    scale_by_factors(const T* x, const float* factor, const int* ids, T* y, i64 elements, i64 h,
                     int factors) {
  wait_and_launch_dependents();
  const i64 at = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= elements) return;
  float own = 0;
  if constexpr (by_ids) {
    const int id = ids[at];
    if (id >= 0 && id < factors) own = factor[id];
  } else {
    own = factor[at / h];
  }
  y[at] = from_float<T>(own * to_float(x[at]));
}

}  // namespace fftune
