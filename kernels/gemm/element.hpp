// Element types of device code, by the dtypes of the host.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "core/dtype.hpp"
#include "kernels/gemm/form.cuh"

namespace fftune {

/// Names of the enumerators of `element`, in their order.
inline constexpr std::array<std::string_view, 4> element_names{"f32", "bf16", "fp16", "fp8"};

/// Throws Error(internal) for a dtype that no kernel multiplies.
element element_of(DType dtype);

/// "fftune::element::bf16".
inline std::string element_text(element type) {
  return "fftune::element::" + std::string(element_names[static_cast<std::size_t>(type)]);
}

}  // namespace fftune
