// The inner loops of cpu_vector.hpp and cpu_rows.hpp, compiled for the target of the build: four
// lanes, as SSE and NEON have.
#include "kernels/common/cpu_rows.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

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

// Whether a or b has a NaN.
inline bool any_nan(Vector a, Vector b) {
  typedef std::uint64_t Words __attribute__((vector_size(lanes * sizeof(float))));
  const Words words = reinterpret<Words>((a != a) | (b != b));
  return (words[0] | words[1]) != 0;
}

#include "kernels/common/cpu_rows.inc"

}  // namespace

const IsaKernels& isa_kernels_portable() {
  return isa_kernels_here();
}

}  // namespace fftune
