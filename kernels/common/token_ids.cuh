// Vectorised token ids, and the logit of a blocked token.
#pragma once

#include "common/float16.cuh"

namespace fftune {

template <class T>
__device__ __forceinline__ T negative_infinity() {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(0xff800000u);
  } else if constexpr (is_same<T, bf16>) {
    return T{0xff80};
  } else {
    return T{0xfc00};
  }
}

// Neighbouring ids that one access loads.
template <class Id, int count>
struct alignas(count* static_cast<int>(sizeof(Id))) id_run {
  Id value[count];
};

}  // namespace fftune
