// bf16 and fp16. Conversions are single PTX instructions; every arithmetic value is a float.
#pragma once

#include "common/types.cuh"

namespace fftune {

struct bf16 {
  u16 bits;
};

struct fp16 {
  u16 bits;
};

__device__ __forceinline__ float to_float(float value) {
  return value;
}

__device__ __forceinline__ float to_float(bf16 value) {
  return __uint_as_float(static_cast<u32>(value.bits) << 16);  // bf16 is the upper half of a float
}

__device__ __forceinline__ float to_float(fp16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

// Rounds to nearest even, as every store in the library does.
template <class T>
__device__ __forceinline__ T from_float(float value) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else {
    T result;
    if constexpr (is_same<T, bf16>) {
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    } else {
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    }
    return result;
  }
}

// Two values in one register, the first in the lower half: the order of memory.
template <class T>
__device__ __forceinline__ u32 pack(float first, float second) {
  u32 result;
  if constexpr (is_same<T, bf16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  }
  return result;
}

template <class T>
__device__ __forceinline__ void unpack(u32 pair, float& first, float& second) {
  first = to_float(T{static_cast<u16>(pair)});
  second = to_float(T{static_cast<u16>(pair >> 16)});
}

template <class T>
__device__ __forceinline__ void add_pair(float& first, float& second, u32 pair) {
  float more_first, more_second;
  unpack<T>(pair, more_first, more_second);
  first += more_first;
  second += more_second;
}

}  // namespace fftune
