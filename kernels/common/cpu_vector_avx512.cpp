// The inner loops of cpu_vector.hpp and cpu_rows.hpp, compiled for avx512.
#include "kernels/common/cpu_rows.hpp"

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace fftune {
namespace {

constexpr std::size_t lanes = 16;      // floats of a vector register
constexpr std::size_t tile_rows = 12;  // by two vectors of tokens: what the registers hold

// The greater and the lesser of two, or `value` where that is a NaN; in all lanes, by a mask,
// because GCC 12 warns of the plain ones' undefined destination.
inline __m512 greater(__m512 value, __m512 other) {
  return _mm512_maskz_max_ps(0xffff, other, value);
}
inline __m512 lesser(__m512 value, __m512 other) {
  return _mm512_maskz_min_ps(0xffff, other, value);
}

#include "kernels/common/cpu_vector.inc"

// Around the caches, to addresses at the vector's own alignment; and what makes such stores
// visible.
inline void stream(void* to, Vector value) {
  _mm512_stream_ps(static_cast<float*>(to), reinterpret<__m512>(value));
}
inline void stream_fence() {
  _mm_sfence();
}

// Whether a or b has a NaN.
inline bool any_nan(Vector a, Vector b) {
  return _mm512_cmp_ps_mask(reinterpret<__m512>(a), reinterpret<__m512>(b), _CMP_UNORD_Q) != 0;
}

#include "kernels/common/cpu_rows.inc"

}  // namespace

const IsaKernels& isa_kernels_avx512() {
  return isa_kernels_here();
}

}  // namespace fftune
