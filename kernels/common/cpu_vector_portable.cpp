// The inner loops of cpu_vector.hpp and cpu_rows.hpp, compiled for the target of the build: four
// lanes, as SSE and NEON have.
#include "kernels/common/cpu_vector.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/common/cpu_rows.hpp"

namespace fftune {
namespace {

constexpr std::size_t lanes = 4;      // floats of a vector register
constexpr std::size_t tile_rows = 6;  // by two vectors of tokens: what the registers hold

// The greater and the lesser of two, or `value` where that is a NaN.
typedef float Floats __attribute__((vector_size(lanes * sizeof(float))));
inline Floats greater(Floats value, Floats other) {
  return value < other ? other : value;
}
inline Floats lesser(Floats value, Floats other) {
  return value > other ? other : value;
}

#include "kernels/common/cpu_vector.inc"

// No portable store goes around the caches.
inline void stream(void* to, Vector value) {
  std::memcpy(to, &value, sizeof value);
}
inline void stream_fence() {}

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

// Whether a or b has a NaN.
inline bool any_nan(Vector a, Vector b) {
  typedef std::uint64_t Words __attribute__((vector_size(lanes * sizeof(float))));
  const Words words = reinterpret<Words>((a != a) | (b != b));
  return (words[0] | words[1]) != 0;
}

#include "kernels/common/cpu_rows.inc"

}  // namespace

const VectorKernels& vector_kernels_portable() {
  static constexpr VectorKernels kernels = vector_kernels_here();
  return kernels;
}

const RowKernels& row_kernels_portable(DType dtype) {
  return row_kernels_here(dtype);
}

}  // namespace fftune
