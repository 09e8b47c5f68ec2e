// Data between blocks of one launch without fences: words that carry a tag beside their data.
//
// A word of 16 bytes is read and written in one access (PTX ISA, "Memory consistency model":
// .b128 scalars are one memory operation), so a reader that finds the tag has the data too: one
// trip through L2, where a flag of its own would cost a fence, a second trip and the read.
#pragma once

#include "common/types.cuh"

namespace fftune {

struct tagged_word {
  u32 data[2];
  u64 tag;
};

__device__ __forceinline__ void store_tagged(void* address, u32 first, u32 second, u64 tag) {
  asm volatile(
      "{.reg .b128 word;\n"
      ".reg .b64 data;\n"
      "mov.b64 data, {%1, %2};\n"
      "mov.b128 word, {data, %3};\n"
      "st.relaxed.gpu.global.b128 [%0], word;}" ::"l"(address),
      "r"(first), "r"(second), "l"(tag)
      : "memory");
}

__device__ __forceinline__ tagged_word load_tagged(const void* address) {
  tagged_word word;
  asm volatile(
      "{.reg .b128 word;\n"
      ".reg .b64 data;\n"
      "ld.relaxed.gpu.global.b128 word, [%3];\n"
      "mov.b128 {data, %2}, word;\n"
      "mov.b64 {%0, %1}, data;}"
      : "=r"(word.data[0]), "=r"(word.data[1]), "=l"(word.tag)
      : "l"(address)
      : "memory");
  return word;
}

// The tag of the run after the one of this tag: a linear congruential generator (Knuth, MMIX) of
// full period and without a fixed point. Memory that no run has written, all zeros, all of one
// byte or anything else, holds the next tag no more often than 64 random bits would.
__device__ __forceinline__ u64 next_tag(u64 tag) {
  return tag * 6364136223846793005ull + 1442695040888963407ull;
}

}  // namespace fftune
