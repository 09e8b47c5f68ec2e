#include "kernels/gemm/element.hpp"

#include <fmt/format.h>

#include "core/error.hpp"

namespace fftune {

element element_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return element::f32;
    case DType::bf16:
      return element::bf16;
    case DType::fp16:
      return element::fp16;
    case DType::fp8:
      return element::fp8;
    default:
      throw Error(ErrorKind::internal,
                  fmt::format("no kernel multiplies elements of {}", dtype_name(dtype)));
  }
}

}  // namespace fftune
