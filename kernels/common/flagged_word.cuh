// Communication between blocks of one launch without fences: the flag is in the data's word.
//
// A word of 16 bytes is read and written in one access (PTX ISA, "Memory consistency model": .b128
// scalars are one memory operation), so a reader that sees the flag has the data too. This takes
// one round trip to L2; a separate flag takes a fence and a second round trip.
#pragma once

#include "common/types.cuh"

namespace fftune {

struct flagged_word {
  u32 data[2];
  u64 flag;
};

__device__ __forceinline__ void store_flagged(void* address, u32 first, u32 second, u64 flag) {
  asm volatile(
      "{.reg .b128 word;\n"
      ".reg .b64 data;\n"
      "mov.b64 data, {%1, %2};\n"
      "mov.b128 word, {data, %3};\n"
      "st.relaxed.gpu.global.b128 [%0], word;}" ::"l"(address),
      "r"(first), "r"(second), "l"(flag)
      : "memory");
}

__device__ __forceinline__ flagged_word load_flagged(const void* address) {
  flagged_word word;
  asm volatile(
      "{.reg .b128 word;\n"
      ".reg .b64 data;\n"
      "ld.relaxed.gpu.global.b128 word, [%3];\n"
      "mov.b128 {data, %2}, word;\n"
      "mov.b64 {%0, %1}, data;}"
      : "=r"(word.data[0]), "=r"(word.data[1]), "=l"(word.flag)
      : "l"(address)
      : "memory");
  return word;
}

// The flag of the run after the one of this flag: a linear congruential generator (Knuth, MMIX) of
// full period and without a fixed point. Memory that no run has written, all zeros, all of one
// byte or anything else, holds the next flag no more often than 64 random bits would.
__device__ __forceinline__ u64 next_flag(u64 flag) {
  return flag * 6364136223846793005ull + 1442695040888963407ull;
}

}  // namespace fftune
