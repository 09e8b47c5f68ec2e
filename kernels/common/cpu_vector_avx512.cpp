// The inner loops of cpu_vector.hpp and cpu_rows.hpp, compiled for avx512.
#include "kernels/common/cpu_vector.hpp"

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/common/cpu_rows.hpp"

namespace fftune {
namespace {

constexpr std::size_t lanes = 16;      // floats of a vector register
constexpr std::size_t tile_rows = 12;  // by two vectors of tokens: what the registers hold

#include "kernels/common/cpu_vector.inc"

// Around the caches, to addresses at the vector's own alignment; and what makes such stores
// visible.
inline void stream(void* to, Vector value) {
  _mm512_stream_ps(static_cast<float*>(to), reinterpret<__m512>(value));
}
inline void stream_fence() {
  _mm_sfence();
}

// 16-bit integers to 32 bits, and back those that fit: of one vector, or of two side by side.
inline Bits wider(Halves value) {
  return __builtin_convertvector(value, Bits);
}
inline Halves narrower(Bits value) {
  return __builtin_convertvector(value, Halves);
}

inline Vector paired(Bits low, Bits high) {
  const Halves halves[2] = {narrower(low), narrower(high)};
  return load<Vector>(halves);
}

#include "kernels/common/cpu_rows.inc"

}  // namespace

const VectorKernels& vector_kernels_avx512() {
  static constexpr VectorKernels kernels = vector_kernels_here();
  return kernels;
}

const RowKernels& row_kernels_avx512(DType dtype) {
  return row_kernels_here(dtype);
}

}  // namespace fftune
