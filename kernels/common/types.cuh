// Fixed-width integers and 16-bit floats for sources that NVRTC compiles without any toolkit
// header. Conversions are single PTX instructions; every arithmetic value is a float.
#pragma once

namespace fftune {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct bf16 {
  u16 bits;
};

struct fp16 {
  u16 bits;
};

template <class First, class Second>
inline constexpr bool is_same = false;
template <class Type>
inline constexpr bool is_same<Type, Type> = true;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8);

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

template <class Integer>
__host__ __device__ constexpr Integer ceil_div(Integer value, Integer divisor) {
  return (value + divisor - 1) / divisor;
}

__host__ __device__ constexpr int larger(int first, int second) {
  return first > second ? first : second;
}
__host__ __device__ constexpr int smaller(int first, int second) {
  return first < second ? first : second;
}

}  // namespace fftune
