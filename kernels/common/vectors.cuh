// Vectorised accesses to global memory: neighbouring elements that a thread moves in one access,
// and their conversions.
#pragma once

#include "common/numerics.cuh"

namespace fftune {

// --- 16-byte accesses: the widest that a thread can issue, eight 16-bit elements ---

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

// --- Vectors of a row ---
//
// A thread moves the neighbouring elements of a vector in one access of 2 to 16 bytes. A vector of
// a wider element type has the same elements and takes several such accesses.

template <class T, int count>
struct aligned_vector {
  static constexpr int bytes = count * static_cast<int>(sizeof(T));
  static constexpr int words = bytes < 4 ? 1 : bytes / 4;
  static_assert(bytes == 2 || bytes == 4 || bytes == 8 || bytes % 16 == 0);
  u32 word[words];  // the first element in the lowest bits, as in memory
};

// The L2 eviction policy of data that is accessed once: evict_first, so that it displaces nothing
// that is read again, or evict_normal.
template <bool evict_first>
__device__ __forceinline__ u64 l2_eviction_policy() {
  u64 policy;
  if constexpr (evict_first) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

// Loads data that no other thread reads, without allocating it in L1. If not `valid`, the result is
// zero and no memory is accessed. The predicate is part of the asm: a branch would keep consecutive
// loads from being in flight together.
template <class T, int count>
__device__ __forceinline__ aligned_vector<T, count> load_once(const T* address, bool valid,
                                                              u64 policy) {
  aligned_vector<T, count> result = {};
  const u32 on = valid ? 1u : 0u;
  u32* const word = result.word;
  if constexpr (aligned_vector<T, count>::bytes == 2) {
    u16 half = 0;
    asm volatile(
        "{.reg .pred on;\nsetp.ne.u32 on, %3, 0;\n"
        "@on ld.global.L1::no_allocate.L2::cache_hint.b16 %0, [%1], %2;}"
        : "+h"(half)
        : "l"(address), "l"(policy), "r"(on));
    word[0] = half;
  } else if constexpr (aligned_vector<T, count>::bytes == 4) {
    asm volatile(
        "{.reg .pred on;\nsetp.ne.u32 on, %3, 0;\n"
        "@on ld.global.L1::no_allocate.L2::cache_hint.b32 %0, [%1], %2;}"
        : "+r"(word[0])
        : "l"(address), "l"(policy), "r"(on));
  } else if constexpr (aligned_vector<T, count>::bytes == 8) {
    asm volatile(
        "{.reg .pred on;\nsetp.ne.u32 on, %4, 0;\n"
        "@on ld.global.L1::no_allocate.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;}"
        : "+r"(word[0]), "+r"(word[1])
        : "l"(address), "l"(policy), "r"(on));
  } else {
#pragma unroll
    for (int i = 0; i < aligned_vector<T, count>::words; i += 4) {
      asm volatile(
          "{.reg .pred on;\nsetp.ne.u32 on, %6, 0;\n"
          "@on ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;}"
          : "+r"(word[i]), "+r"(word[i + 1]), "+r"(word[i + 2]), "+r"(word[i + 3])
          : "l"(reinterpret_cast<const char*>(address) + i * 4), "l"(policy), "r"(on));
    }
  }
  return result;
}

// Loads data that many blocks read, such as a row of weights, through L1.
template <class T, int count>
__device__ __forceinline__ aligned_vector<T, count> load_through_l1(const T* address, bool valid) {
  aligned_vector<T, count> result = {};
  if (!valid) return result;
  if constexpr (aligned_vector<T, count>::bytes == 2) {
    result.word[0] = *reinterpret_cast<const u16*>(address);
  } else if constexpr (aligned_vector<T, count>::bytes == 4) {
    result.word[0] = *reinterpret_cast<const u32*>(address);
  } else if constexpr (aligned_vector<T, count>::bytes == 8) {
    const uint2 pair = *reinterpret_cast<const uint2*>(address);
    result.word[0] = pair.x;
    result.word[1] = pair.y;
  } else {
#pragma unroll
    for (int i = 0; i < aligned_vector<T, count>::words; i += 4) {
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
__device__ __forceinline__ void store_once(T* address, const aligned_vector<T, count>& value,
                                           u64 policy) {
  const u32* const word = value.word;
  if constexpr (aligned_vector<T, count>::bytes == 2) {
    asm volatile("st.global.L2::cache_hint.b16 [%0], %1, %2;" ::"l"(address),
                 "h"(static_cast<u16>(word[0])), "l"(policy)
                 : "memory");
  } else if constexpr (aligned_vector<T, count>::bytes == 4) {
    asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(address), "r"(word[0]),
                 "l"(policy)
                 : "memory");
  } else if constexpr (aligned_vector<T, count>::bytes == 8) {
    asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(address), "r"(word[0]),
                 "r"(word[1]), "l"(policy)
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < aligned_vector<T, count>::words; i += 4) {
      asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(
                       reinterpret_cast<char*>(address) + i * 4),
                   "r"(word[i]), "r"(word[i + 1]), "r"(word[i + 2]), "r"(word[i + 3]), "l"(policy)
                   : "memory");
    }
  }
}

// Stores neighbouring floats. `to` is aligned to all of them, or to 16 bytes if they are more.
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

// Keeps the compiler from reusing floats that these elements were converted to before. Converting
// again costs an instruction an element; holding the floats would take twice the registers.
template <class T, int count>
__device__ __forceinline__ void prevent_float_reuse(aligned_vector<T, count>& packed) {
  if constexpr (sizeof(T) == 4) return;
#pragma unroll
  for (int i = 0; i < aligned_vector<T, count>::words; ++i) asm volatile("" : "+r"(packed.word[i]));
}

template <class T, int count>
__device__ __forceinline__ void to_floats(const aligned_vector<T, count>& from,
                                          float (&to)[count]) {
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

// A second conversion of the same elements that the compiler cannot merge with the first: holding
// the first one's floats until here would take twice the registers. `zero` must be 0 and unknown to
// the compiler.
template <class T, int count>
__device__ __forceinline__ void to_floats_again(const aligned_vector<T, count>& from,
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
    aligned_vector<T, count> other;
#pragma unroll
    for (int i = 0; i < aligned_vector<T, count>::words; ++i) other.word[i] = from.word[i] ^ zero;
    to_floats(other, to);
  } else {
    to_floats(from, to);
  }
}

// Rounds to nearest even.
template <class T, int count>
__device__ __forceinline__ aligned_vector<T, count> from_floats(const float (&from)[count]) {
  aligned_vector<T, count> result;
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

// The elements of a quantised row (numerics.cuh), from values that are divided by its scale.
template <class Q, int count>
__device__ __forceinline__ aligned_vector<Q, count> quantise(const float (&from)[count]) {
  aligned_vector<Q, count> result = {};
#pragma unroll
  for (int i = 0; i < count; i += 2) {
    result.word[i / 4] |= quantised_pair<Q>(from[i], from[i + 1]) << (i % 4 * 8);
  }
  return result;
}

// Neighbouring ids that one access loads.
template <class Id, int count>
struct alignas(count* static_cast<int>(sizeof(Id))) id_run {
  Id value[count];
};

// --- The loop of a plain elementwise kernel, as baselines have it ---

// Calls body(row, column) for each of this thread's elements of a matrix. Block: 256. Grid:
// (ceil(columns / 1024), min(rows, 65535)).
template <class Body>
__device__ __forceinline__ void for_elements(i64 rows, i64 columns, const Body& body) {
  const i64 first = static_cast<i64>(blockIdx.x) * 1024 + threadIdx.x;
  for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (first + e * 256 < columns) body(row, first + e * 256);
    }
  }
}

}  // namespace fftune
