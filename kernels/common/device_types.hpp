// The names that device sources have for the host's types: template arguments of name expressions.
#pragma once

#include <string>

#include "core/dtype.hpp"

namespace fftune {

/// Of common/float16.cuh: "float", "fftune::bf16", "fftune::fp16".
inline std::string element_type(DType dtype) {
  return dtype == DType::f32 ? "float" : "fftune::" + std::string(dtype_name(dtype));
}

/// Of common/types.cuh: "int", "fftune::i64".
inline std::string integer_type(DType dtype) {
  return dtype == DType::i64 ? "fftune::i64" : "int";
}

}  // namespace fftune
