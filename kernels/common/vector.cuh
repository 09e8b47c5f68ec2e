// 16-byte global accesses: the widest that a thread can issue, eight 16-bit elements.
#pragma once

#include "common/types.cuh"

namespace fftune {

struct alignas(16) vector16 {
  u32 word[4];
};

// A weight that is read once: keep it out of L1, where the activations are.
__device__ __forceinline__ vector16 load_streaming(const void* address) {
  vector16 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "l"(address));
  return value;
}

// A read-only operand that other warps or blocks read too.
__device__ __forceinline__ vector16 load_cached(const void* address) {
  vector16 value;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "l"(address));
  return value;
}

// An operand that the kernel before writes, where this kernel is launched programmatically:
// ld.global.nc must not be used then.
__device__ __forceinline__ vector16 load_dependent(const void* address) {
  vector16 value;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "l"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ u32 load_dependent_word(const void* address) {
  u32 value;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// From L2, where another block of this launch may just have written: L1 is not coherent between
// SMs.
__device__ __forceinline__ float4 load_coherent(const float* address) {
  float4 value;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

// Likewise, and where a kernel before this one wrote that this one has not waited for, because it
// was complete when this one began.
__device__ __forceinline__ int load_coherent_word(const int* address) {
  int value;
  asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_coherent(float* address, float4 value) {
  asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

__device__ __forceinline__ float2 load_coherent_pair(const float* address) {
  float2 value;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "l"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_coherent(float* address, float2 value) {
  asm volatile("st.global.cg.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(value.x), "f"(value.y)
               : "memory");
}

__device__ __forceinline__ void add(float4& sum, float4 value) {
  sum.x += value.x;
  sum.y += value.y;
  sum.z += value.z;
  sum.w += value.w;
}

__device__ __forceinline__ void store(void* address, const vector16& value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.word[0]),
               "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
               : "memory");
}

}  // namespace fftune
