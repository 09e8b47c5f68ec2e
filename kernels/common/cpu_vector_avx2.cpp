// The inner loops of cpu_vector.hpp and cpu_rows.hpp, compiled for avx2.
#include "kernels/common/cpu_rows.hpp"

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace fftune {
namespace {

constexpr std::size_t lanes = 8;      // floats of a vector register
constexpr std::size_t tile_rows = 6;  // by two vectors of tokens: what the registers hold

// The greater and the lesser of two, or `value` where that is a NaN.
inline __m256 greater(__m256 value, __m256 other) {
  return _mm256_max_ps(other, value);
}
inline __m256 lesser(__m256 value, __m256 other) {
  return _mm256_min_ps(other, value);
}

#include "kernels/common/cpu_vector.inc"

// Around the caches, to addresses at the vector's own alignment; and what makes such stores
// visible.
inline void stream(void* to, Vector value) {
  _mm256_stream_ps(static_cast<float*>(to), reinterpret<__m256>(value));
}
inline void stream_fence() {
  _mm_sfence();
}

// Replaces the templates of cpu_rows.inc, for which GCC 12 generates many more instructions.
inline Bits wider(Halves value) {
  return reinterpret<Bits>(_mm256_cvtepu16_epi32(reinterpret<__m128i>(value)));
}
inline Halves narrower(Bits value) {
  const auto all = reinterpret<__m256i>(value);
  return reinterpret<Halves>(
      _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}

inline Vector paired(Bits low, Bits high) {
  const __m256i halves = _mm256_packus_epi32(reinterpret<__m256i>(low), reinterpret<__m256i>(high));
  return reinterpret<Vector>(_mm256_permute4x64_epi64(halves, 0xd8));
}

// Whether a or b has a NaN.
inline bool any_nan(Vector a, Vector b) {
  return _mm256_movemask_ps(
             _mm256_cmp_ps(reinterpret<__m256>(a), reinterpret<__m256>(b), _CMP_UNORD_Q)) != 0;
}

#include "kernels/common/cpu_rows.inc"

}  // namespace

const IsaKernels& isa_kernels_avx2() {
  return isa_kernels_here();
}

}  // namespace fftune
