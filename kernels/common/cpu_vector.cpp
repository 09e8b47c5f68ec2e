#include "kernels/common/cpu_rows.hpp"

namespace fftune {
namespace {

const IsaKernels& isa_kernels([[maybe_unused]] std::string_view isa) {
#if defined(__x86_64__)
  if (isa == "avx512") return isa_kernels_avx512();
  if (isa == "avx2") return isa_kernels_avx2();
#endif
  return isa_kernels_portable();
}

}  // namespace

const VectorKernels& vector_kernels(std::string_view isa) {
  return isa_kernels(isa).vector;
}

const RowKernels& row_kernels(std::string_view isa, DType dtype) {
  const IsaKernels& kernels = isa_kernels(isa);
  return dtype == DType::f32 ? kernels.f32 : kernels.bf16;
}

}  // namespace fftune
