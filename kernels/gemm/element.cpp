#include "kernels/gemm/element.hpp"

#include <fmt/format.h>

#include "core/error.hpp"
#include "core/lookup.hpp"

namespace fftune {

element element_of(DType dtype) {
  if (const auto found = find_value<DType, element>(dtype, {{DType::f32, element::f32},
                                                            {DType::bf16, element::bf16},
                                                            {DType::fp16, element::fp16},
                                                            {DType::fp8, element::fp8}}))
    return *found;
  throw Error(ErrorKind::internal,
              fmt::format("no kernel multiplies elements of {}", dtype_name(dtype)));
}

}  // namespace fftune
