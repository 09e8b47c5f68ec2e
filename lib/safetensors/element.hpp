// Element types of saved tensors, as safetensors names them.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string_view>

#include "core/dtype.hpp"

namespace fftune {

/// f8_e8m0 are the powers of two by which blocks of smaller types are scaled.
enum class Element {
  f64,
  f32,
  f16,
  bf16,
  f8_e4m3,
  f8_e5m2,
  f8_e8m0,
  i64,
  i32,
  i16,
  i8,
  u64,
  u32,
  u16,
  u8,
  boolean
};

/// "F64", "BF16", "F8_E4M3", "BOOL".
std::string_view element_name(Element element);
std::optional<Element> parse_element(std::string_view name);
/// All of them, with commas between: for complaints.
std::string_view element_names();
std::size_t element_bytes(Element element);
/// The op's type that has the same bits, if there is one.
std::optional<DType> dtype_of(Element element);

/// Reads values.size() elements, which need not be aligned. Exact but for integers beyond 2^53.
void decode(Element element, const std::byte* in, std::span<double> values);

/// Reads `count` elements, which need not be aligned, and rounds them to `dtype`; copies them where
/// the types are one.
void convert(Element element, const std::byte* in, DType dtype, std::byte* out, std::size_t count);

}  // namespace fftune
