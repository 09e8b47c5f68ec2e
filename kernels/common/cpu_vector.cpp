#include "kernels/common/cpu_vector.hpp"

namespace fftune {

const VectorKernels& vector_kernels([[maybe_unused]] std::string_view isa) {
#if defined(__x86_64__)
  if (isa == "avx512") return vector_kernels_avx512();
  if (isa == "avx2") return vector_kernels_avx2();
#endif
  return vector_kernels_portable();
}

}  // namespace fftune
