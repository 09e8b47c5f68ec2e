// The inner loops of cpu_vector.hpp, compiled for avx2.
#include "kernels/common/cpu_vector.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fftune {
namespace {

constexpr std::size_t lanes = 8;      // floats of a vector register
constexpr std::size_t tile_rows = 6;  // by two vectors of tokens: what the registers hold

#include "kernels/common/cpu_vector.inc"

}  // namespace

const VectorKernels& vector_kernels_avx2() {
  static constexpr VectorKernels kernels = vector_kernels_here();
  return kernels;
}

}  // namespace fftune
