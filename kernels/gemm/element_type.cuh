// The device's type of an element.
#pragma once

#include "common/numerics.cuh"
#include "gemm/form.cuh"

namespace fftune {

template <element type>
using element_type = typename type_at<static_cast<int>(type), float, bf16, fp16, fp8>::type;

}  // namespace fftune
