// How the persistent form of layers (layer/persistent.cu) reaches memory besides shared memory
// (gemm/decode/shared_stream.cuh): words between CTAs of one launch, which their readers poll, and
// sums over warps.
#pragma once

#include "common/async.cuh"
#include "common/mma.cuh"
#include "common/vectors.cuh"
#include "gemm/decode/shared_stream.cuh"

namespace fftune {

// Half a word that is needed later. It has a whole register: halves would be merged, and waited
// for.
__device__ __forceinline__ u32 load_ahead(const void* address) {
  u32 value;
  asm volatile("ld.global.u16 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}
template <class T>
__device__ __forceinline__ float half_of(u32 bits) {
  T value;
  value.bits = static_cast<u16>(bits);
  return to_float(value);
}

// Words that other CTAs may be writing, and stores that they see.
__device__ __forceinline__ vector16 load_relaxed(const void* address) {
  vector16 value;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "l"(address)
               : "memory");
  return value;
}
__device__ __forceinline__ u32 load_relaxed_word(const void* address) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
// A word that another CTA writes.
__device__ __forceinline__ float wait_for_float(const float* address) {
  u32 word;
  int spins = 0;
  do {
    word = load_relaxed_word(address);
    count_spin(spins);
  } while (word == 0);
  return __uint_as_float(~word);
}
__device__ __forceinline__ u16 load_relaxed_half(const void* address) {
  u16 value;
  asm volatile("ld.relaxed.gpu.global.b16 %0, [%1];" : "=h"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed(float* address, float value) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(address), "r"(~__float_as_uint(value))
               : "memory");
}
template <class T>
__device__ __forceinline__ void store_relaxed(T* address, T value) {
  asm volatile("st.relaxed.gpu.global.b16 [%0], %1;" ::"l"(address),
               "h"(static_cast<u16>(~value.bits))
               : "memory");
}

// Whether all `threads` threads of a named barrier say so.
__device__ __forceinline__ bool named_barrier_all(int id, int threads, bool own) {
  u32 all;
  asm volatile(
      "{.reg .pred own, all;\n"
      "setp.ne.u32 own, %3, 0;\n"
      "bar.red.and.pred all, %1, %2, own;\n"
      "selp.u32 %0, 1, 0, all;}"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(own ? 1u : 0u)
      : "memory");
  return all != 0;
}

__device__ __forceinline__ u32 transposed_matrix(u32 word) {
  u32 result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

// Over the lanes of a warp.
__device__ __forceinline__ float warp_total(float value) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) value += __shfl_xor_sync(~0u, value, other);
  return value;
}
__device__ __forceinline__ float warp_largest(float value) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2)
    value = fmaxf(value, __shfl_xor_sync(~0u, value, other));
  return value;
}
__device__ __forceinline__ u32 largest_of_warp(u32 value) {
  u32 result;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
  return result;
}
__device__ __forceinline__ u32 smallest_of_warp(u32 value) {
  u32 result;
  asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
  return result;
}

// An integer above 0 in the order of floats, both zeros alike and NaN above all.
__device__ __forceinline__ u32 order_of(float value) {
  const u32 bits = __float_as_uint(value + 0.0f);
  return value != value ? ~0u : bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Registers of the threads of a warpgroup from now on.
template <int count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// A word that has not been written is zero: what is exchanged is stored as its complement.
__device__ __forceinline__ bool has_zero_half(u32 word) {
  return ((word - 0x00010001u) & ~word & 0x80008000u) != 0;
}
__device__ __forceinline__ bool is_missing(const vector16& halves) {
  return has_zero_half(halves.word[0]) || has_zero_half(halves.word[1]) ||
         has_zero_half(halves.word[2]) || has_zero_half(halves.word[3]);
}
__device__ __forceinline__ vector16 complement(vector16 value) {
#pragma unroll
  for (u32& word : value.word) word = ~word;
  return value;
}

}  // namespace fftune
