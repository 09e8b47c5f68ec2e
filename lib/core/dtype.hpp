// Element types and their conversions to and from float, rounding to nearest even.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace fftune {

/// fp8 is e4m3 (OCP 8-bit floating point, 2023): 4 exponent bits, 3 of mantissa, no infinity.
/// u8 is a byte, a whole number from 0 to 255: masks. No problem computes in it.
enum class DType { f32, bf16, fp16, fp8, u8 };

/// "f32", "bf16", "fp16", "fp8", "u8".
std::string_view dtype_name(DType dtype);
/// Of those a problem can have. Throws Error(invalid_input) for another name.
DType parse_dtype(std::string_view name);
/// Bytes of one element.
std::size_t dtype_bytes(DType dtype);
/// Unit roundoff: half the distance from 1 to the next number (2^-24, 2^-8 with 7 stored mantissa
/// bits for bf16, 2^-11 for fp16, 2^-4 for fp8; 0 for u8).
double dtype_unit_roundoff(DType dtype);

std::uint16_t bf16_from_float(float value);
float float_from_bf16(std::uint16_t bits);
std::uint16_t fp16_from_float(float value);
float float_from_fp16(std::uint16_t bits);
/// What is beyond the largest number becomes that, 448, as the GPU's conversion does it.
std::uint8_t fp8_from_float(float value);
float float_from_fp8(std::uint8_t bits);

/// Rounds each value to `dtype` and stores it at `out` (values.size() elements of that type).
void encode(DType dtype, std::span<const float> values, void* out);
/// The inverse of encode, exact.
void decode(DType dtype, const void* in, std::span<float> values);
/// `value` rounded to `dtype` and back.
double round_to(DType dtype, double value);

}  // namespace fftune
