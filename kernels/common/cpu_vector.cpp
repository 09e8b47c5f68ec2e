#include "kernels/common/cpu_vector.hpp"

#include "kernels/common/cpu_rows.hpp"

namespace fftune {

const VectorKernels& vector_kernels([[maybe_unused]] std::string_view isa) {
#if defined(__x86_64__)
  if (isa == "avx512") return vector_kernels_avx512();
  if (isa == "avx2") return vector_kernels_avx2();
#endif
  return vector_kernels_portable();
}

const RowKernels& row_kernels([[maybe_unused]] std::string_view isa, DType dtype) {
#if defined(__x86_64__)
  if (isa == "avx512") return row_kernels_avx512(dtype);
  if (isa == "avx2") return row_kernels_avx2(dtype);
#endif
  return row_kernels_portable(dtype);
}

}  // namespace fftune
