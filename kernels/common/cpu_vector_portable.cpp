// The inner loops of cpu_vector.hpp, compiled for the target of the build: four lanes, as SSE and
// NEON have.
#include "kernels/common/cpu_vector.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fftune {
namespace {

constexpr std::size_t lanes = 4;      // floats of a vector register
constexpr std::size_t tile_rows = 6;  // by two vectors of tokens: what the registers hold

#include "kernels/common/cpu_vector.inc"

}  // namespace

const VectorKernels& vector_kernels_portable() {
  static constexpr VectorKernels kernels = vector_kernels_here();
  return kernels;
}

}  // namespace fftune
