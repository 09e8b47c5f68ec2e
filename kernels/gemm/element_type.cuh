// The device's type of an element.
#pragma once

#include "common/float8.cuh"
#include "gemm/form.cuh"

namespace fftune {

template <element type>
struct element_types;
template <>
struct element_types<element::f32> {
  using type = float;
};
template <>
struct element_types<element::bf16> {
  using type = bf16;
};
template <>
struct element_types<element::fp16> {
  using type = fp16;
};
template <>
struct element_types<element::fp8> {
  using type = fp8;
};
template <element type>
using element_type = typename element_types<type>::type;

}  // namespace fftune
