// Ids of tokens as they are read, and the logit of a token that must not come.
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

// Neighbouring ids, which one access moves.
template <class Id, int count>
struct alignas(count* static_cast<int>(sizeof(Id))) id_run {
  Id value[count];
};

}  // namespace fftune
