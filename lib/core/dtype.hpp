// Element types and their conversions to and from float, rounding to nearest even.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace fftune {

/// fp8 is e4m3 (OCP 8-bit floating point, 2023): 4 exponent bits, 3 of mantissa, no infinity. The
/// integers are of tensors that count, name or mark things; no op computes in them.
enum class DType { f32, bf16, fp16, fp8, u8, i8, i32, i64 };

/// "f32", "bf16", "fp16", "fp8", "u8", "i8", "i32", "i64".
std::string_view dtype_name(DType dtype);
/// The element type that an op computes in: throws Error(invalid_input) for any other name.
DType parse_dtype(std::string_view name);
/// Bytes of one element.
std::size_t dtype_bytes(DType dtype);
bool is_integer(DType dtype);
/// Unit roundoff: half the distance from 1 to the next number (2^-24, 2^-8 with 7 stored mantissa
/// bits for bf16, 2^-11 for fp16, 2^-4 for fp8); 0 for integers.
double dtype_unit_roundoff(DType dtype);

std::uint16_t bf16_from_float(float value);
float float_from_bf16(std::uint16_t bits);
std::uint16_t fp16_from_float(float value);
float float_from_fp16(std::uint16_t bits);
/// Values beyond the largest number saturate to it, 448, as in the GPU's conversion.
std::uint8_t fp8_from_float(float value);
float float_from_fp8(std::uint8_t bits);

/// Rounds each value to `dtype` and stores it at `out` (values.size() elements of that type).
/// Values beyond the range of an integer saturate.
void encode(DType dtype, std::span<const float> values, void* out);
/// By way of float where `dtype` is no integer, as a kernel that accumulates in fp32 rounds: twice.
void encode(DType dtype, std::span<const double> values, void* out);
/// The inverse of encode, exact but for integers beyond 2^24 as float, or 2^53 as double.
void decode(DType dtype, const void* in, std::span<float> values);
void decode(DType dtype, const void* in, std::span<double> values);
/// `value` rounded to `dtype` and back.
double round_to(DType dtype, double value);

}  // namespace fftune
