// Rows in memory as operands of mma.sync, 16 bytes at a time. A type of weights or tokens is one
// specialisation of stream_type:
//
//   operand          the 16-bit type that the tensor cores multiply;
//   elements         consecutive elements of k in 16 bytes;
//   packed           elements in one object of the type: rows of k elements have k / packed objects
//   scale            no_scale, or what expand() needs besides the 16 bytes: a type with
//                    load(scales of the row, element of k), for a scale of each group of k
//   expand<Operand>  the 16 bytes as pairs of operands, in the order of k
#pragma once

#include "common/numerics.cuh"
#include "common/vectors.cuh"

namespace fftune {

struct no_scale {};

template <class T>
struct stream_type {
  using operand = T;
  using scale = no_scale;
  static constexpr int elements = 8, packed = 1;
  template <class Operand>
  static __device__ __forceinline__ void expand(const vector16& from, no_scale, u32* pair) {
    static_assert(is_same<T, bf16> || is_same<T, fp16>);
    static_assert(is_same<Operand, T>);
#pragma unroll
    for (int i = 0; i < elements / 2; ++i) pair[i] = from.word[i];
  }
};

// As fp16, which represents all of its values.
template <>
struct stream_type<fp8> {
  using operand = fp16;
  using scale = no_scale;
  static constexpr int elements = 16, packed = 1;
  static __device__ __forceinline__ u32 fp16_of(u32 two) {
    u32 result = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(static_cast<u16>(two)));
#endif
    return result;
  }
  template <class Operand>
  static __device__ __forceinline__ void expand(const vector16& from, no_scale, u32* pair) {
    static_assert(is_same<Operand, fp16>);
#pragma unroll
    for (int i = 0; i < elements / 2; ++i) pair[i] = fp16_of(from.word[i / 2] >> i % 2 * 16);
  }
};

}  // namespace fftune
