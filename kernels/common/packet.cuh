// A thread's piece of a row: the neighbouring elements that one access moves, 2 to 16 bytes, or the
// elements that belong to those in a tensor of a wider type.
#pragma once

#include "common/float16.cuh"

namespace fftune {

template <class T, int count>
struct packet {
  static constexpr int bytes = count * static_cast<int>(sizeof(T));
  static constexpr int words = bytes < 4 ? 1 : bytes / 4;
  static_assert(bytes == 2 || bytes == 4 || bytes == 8 || bytes % 16 == 0);
  u32 word[words];  // the first element in the lowest bits: the order of memory
};

// What L2 should do with lines that pass once: make them the first to go, so that they displace
// nothing that is read again, or treat them like any other.
template <bool streams>
__device__ __forceinline__ u64 stream_policy() {
  u64 policy;
  if constexpr (streams) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

// Loads what no other thread reads, around L1. What is not `valid` reads as zeros without touching
// memory; the predicate is inside, so that loads in a row are all in flight at once.
template <class T, int count>
__device__ __forceinline__ packet<T, count> load_once(const T* address, bool valid, u64 policy) {
  packet<T, count> result = {};
  const u32 on = valid ? 1u : 0u;
  u32* const word = result.word;
  if constexpr (packet<T, count>::bytes == 2) {
    u16 half = 0;
    asm volatile(
        "{.reg .pred on;\nsetp.ne.u32 on, %3, 0;\n"
        "@on ld.global.L1::no_allocate.L2::cache_hint.b16 %0, [%1], %2;}"
        : "+h"(half)
        : "l"(address), "l"(policy), "r"(on));
    word[0] = half;
  } else if constexpr (packet<T, count>::bytes == 4) {
    asm volatile(
        "{.reg .pred on;\nsetp.ne.u32 on, %3, 0;\n"
        "@on ld.global.L1::no_allocate.L2::cache_hint.b32 %0, [%1], %2;}"
        : "+r"(word[0])
        : "l"(address), "l"(policy), "r"(on));
  } else if constexpr (packet<T, count>::bytes == 8) {
    asm volatile(
        "{.reg .pred on;\nsetp.ne.u32 on, %4, 0;\n"
        "@on ld.global.L1::no_allocate.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;}"
        : "+r"(word[0]), "+r"(word[1])
        : "l"(address), "l"(policy), "r"(on));
  } else {
#pragma unroll
    for (int i = 0; i < packet<T, count>::words; i += 4) {
      asm volatile(
          "{.reg .pred on;\nsetp.ne.u32 on, %6, 0;\n"
          "@on ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;}"
          : "+r"(word[i]), "+r"(word[i + 1]), "+r"(word[i + 2]), "+r"(word[i + 3])
          : "l"(reinterpret_cast<const char*>(address) + i * 4), "l"(policy), "r"(on));
    }
  }
  return result;
}

// Loads what many blocks read, such as a row of weights.
template <class T, int count>
__device__ __forceinline__ packet<T, count> load_shared_by_blocks(const T* address, bool valid) {
  packet<T, count> result = {};
  if (!valid) return result;
  if constexpr (packet<T, count>::bytes == 2) {
    result.word[0] = *reinterpret_cast<const u16*>(address);
  } else if constexpr (packet<T, count>::bytes == 4) {
    result.word[0] = *reinterpret_cast<const u32*>(address);
  } else if constexpr (packet<T, count>::bytes == 8) {
    const uint2 pair = *reinterpret_cast<const uint2*>(address);
    result.word[0] = pair.x;
    result.word[1] = pair.y;
  } else {
#pragma unroll
    for (int i = 0; i < packet<T, count>::words; i += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(address)[i / 4];
      result.word[i] = four.x;
      result.word[i + 1] = four.y;
      result.word[i + 2] = four.z;
      result.word[i + 3] = four.w;
    }
  }
  return result;
}

template <class T, int count>
__device__ __forceinline__ void store_once(T* address, const packet<T, count>& value, u64 policy) {
  const u32* const word = value.word;
  if constexpr (packet<T, count>::bytes == 2) {
    asm volatile("st.global.L2::cache_hint.b16 [%0], %1, %2;" ::"l"(address),
                 "h"(static_cast<u16>(word[0])), "l"(policy)
                 : "memory");
  } else if constexpr (packet<T, count>::bytes == 4) {
    asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(address), "r"(word[0]),
                 "l"(policy)
                 : "memory");
  } else if constexpr (packet<T, count>::bytes == 8) {
    asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(address), "r"(word[0]),
                 "r"(word[1]), "l"(policy)
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < packet<T, count>::words; i += 4) {
      asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(
                       reinterpret_cast<char*>(address) + i * 4),
                   "r"(word[i]), "r"(word[i + 1]), "r"(word[i + 2]), "r"(word[i + 3]), "l"(policy)
                   : "memory");
    }
  }
}

// Neighbours to where they are aligned as a whole, or to 16 bytes if they are more.
template <int count>
__device__ __forceinline__ void store_floats(float* to, const float (&from)[count]) {
  constexpr int at_once = count % 4 == 0 ? 4 : count % 2 == 0 ? 2 : 1;
  struct alignas(at_once * 4) run {
    float value[at_once];
  };
#pragma unroll
  for (int i = 0; i < count; i += at_once) {
    run part;
#pragma unroll
    for (int e = 0; e < at_once; ++e) part.value[e] = from[i + e];
    *reinterpret_cast<run*>(to + i) = part;
  }
}

// Hides from the compiler that it has had these elements as floats before: converting them again
// costs an instruction each, keeping them would cost twice the registers.
template <class T, int count>
__device__ __forceinline__ void forget_floats(packet<T, count>& packed) {
  if constexpr (sizeof(T) == 4) return;
#pragma unroll
  for (int i = 0; i < packet<T, count>::words; ++i) asm volatile("" : "+r"(packed.word[i]));
}

template <class T, int count>
__device__ __forceinline__ void to_floats(const packet<T, count>& from, float (&to)[count]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = __uint_as_float(from.word[i]);
  } else if constexpr (count == 1) {
    to[0] = to_float(T{static_cast<u16>(from.word[0])});
  } else {
#pragma unroll
    for (int i = 0; i < count; i += 2) unpack<T>(from.word[i / 2], to[i], to[i + 1]);
  }
}

// The same a second time, so that the compiler does not find that it has had these floats before:
// kept until here they would take twice the registers of what they were made from. `zero` is 0, and
// the compiler must not know it.
template <class T, int count>
__device__ __forceinline__ void to_floats_again(const packet<T, count>& from,
                                                [[maybe_unused]] u32 zero, float (&to)[count]) {
  if constexpr (is_same<T, bf16> && count > 1) {
#pragma unroll
    for (int i = 0; i < count; i += 2) {  // by another instruction than the first time
      u32 first, second;
      asm("prmt.b32 %0, %1, 0, 0x1044;" : "=r"(first) : "r"(from.word[i / 2]));
      asm("prmt.b32 %0, %1, 0, 0x3244;" : "=r"(second) : "r"(from.word[i / 2]));
      to[i] = __uint_as_float(first);
      to[i + 1] = __uint_as_float(second);
    }
  } else if constexpr (sizeof(T) == 2) {
    packet<T, count> other;
#pragma unroll
    for (int i = 0; i < packet<T, count>::words; ++i) other.word[i] = from.word[i] ^ zero;
    to_floats(other, to);
  } else {
    to_floats(from, to);
  }
}

// Rounds to nearest even.
template <class T, int count>
__device__ __forceinline__ packet<T, count> from_floats(const float (&from)[count]) {
  packet<T, count> result;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < count; ++i) result.word[i] = __float_as_uint(from[i]);
  } else if constexpr (count == 1) {
    result.word[0] = from_float<T>(from[0]).bits;
  } else {
#pragma unroll
    for (int i = 0; i < count; i += 2) result.word[i / 2] = pack<T>(from[i], from[i + 1]);
  }
  return result;
}

}  // namespace fftune
