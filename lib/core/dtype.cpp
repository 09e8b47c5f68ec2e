#include "core/dtype.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/error.hpp"

namespace fftune {
namespace {

struct Row {
  std::string_view name;
  std::size_t bytes;
  double unit_roundoff;
};

/// In the order of the enumeration.
constexpr std::array<Row, 8> rows{{{"f32", 4, 0x1p-24},
                                   {"bf16", 2, 0x1p-8},
                                   {"fp16", 2, 0x1p-11},
                                   {"fp8", 1, 0x1p-4},
                                   {"u8", 1, 0},
                                   {"i8", 1, 0},
                                   {"i32", 4, 0},
                                   {"i64", 8, 0}}};

const Row& row_of(DType dtype) {
  const auto place = static_cast<std::size_t>(dtype);
  if (place < rows.size()) return rows[place];
  throw Error(ErrorKind::internal, "a dtype outside the enumeration");
}

/// The nearest integer, ties to even, or the end of the range; 0 for what is no number.
template <typename Integer, typename Value>
Integer nearest(Value value) {
  using Limits = std::numeric_limits<Integer>;
  const double rounded = std::nearbyint(static_cast<double>(value));
  if (std::isnan(rounded)) return 0;
  if (rounded >= std::ldexp(1.0, Limits::digits)) return Limits::max();
  if (rounded < static_cast<double>(Limits::min())) return Limits::min();
  return static_cast<Integer>(rounded);
}

template <typename Integer, typename Value>
void encode_as(std::span<const Value> values, void* out) {
  auto* integers = static_cast<Integer*>(out);
  for (std::size_t i = 0; i < values.size(); ++i) integers[i] = nearest<Integer>(values[i]);
}

template <typename Integer, typename Value>
void decode_as(const void* in, std::span<Value> values) {
  const auto* integers = static_cast<const Integer*>(in);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<Value>(integers[i]);
}

template <typename Value>
void encode_integers(DType dtype, std::span<const Value> values, void* out) {
  if (dtype == DType::u8) return encode_as<std::uint8_t>(values, out);
  if (dtype == DType::i8) return encode_as<std::int8_t>(values, out);
  if (dtype == DType::i32) return encode_as<std::int32_t>(values, out);
  encode_as<std::int64_t>(values, out);
}

template <typename Value>
void decode_integers(DType dtype, const void* in, std::span<Value> values) {
  if (dtype == DType::u8) return decode_as<std::uint8_t>(in, values);
  if (dtype == DType::i8) return decode_as<std::int8_t>(in, values);
  if (dtype == DType::i32) return decode_as<std::int32_t>(in, values);
  decode_as<std::int64_t>(in, values);
}

}  // namespace

std::string_view dtype_name(DType dtype) {
  return row_of(dtype).name;
}

DType parse_dtype(std::string_view name) {
  for (DType dtype : {DType::f32, DType::bf16, DType::fp16, DType::fp8})
    if (name == dtype_name(dtype)) return dtype;
  throw Error(ErrorKind::invalid_input,
              "unknown dtype '" + std::string(name) + "': use f32, bf16, fp16 or fp8");
}

std::size_t dtype_bytes(DType dtype) {
  return row_of(dtype).bytes;
}

bool is_integer(DType dtype) {
  return dtype == DType::u8 || dtype == DType::i8 || dtype == DType::i32 || dtype == DType::i64;
}

double dtype_unit_roundoff(DType dtype) {
  return row_of(dtype).unit_roundoff;
}

std::uint16_t bf16_from_float(float value) {
  auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x0040u);
  // Adding 0x7fff plus the lowest kept bit rounds to nearest, ties to even.
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<std::uint16_t>(bits >> 16);
}

float float_from_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

std::uint16_t fp16_from_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  // 65520 is the midpoint between the largest finite fp16 and the next power: it rounds up.
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is subnormal: a multiple of 2^-24, which lrint rounds to even.
    const float scaled = std::bit_cast<float>(magnitude) * 16777216.0f;
    return sign | static_cast<std::uint16_t>(std::lrint(scaled));
  }
  const std::uint32_t rounded = magnitude + 0x0fffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<std::uint16_t>((rounded - 0x38000000u) >> 13);
}

float float_from_fp16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

std::uint8_t fp8_from_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint8_t>((bits >> 24) & 0x80u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7fu;
  if (magnitude >= 0x43e00000u) return sign | 0x7eu;  // 448 and beyond
  // Below 2^-6 the result is subnormal: a multiple of 2^-9, which lrint rounds to even.
  if (magnitude < 0x3c800000u)
    return sign | static_cast<std::uint8_t>(std::lrint(std::bit_cast<float>(magnitude) * 512.0f));
  const std::uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return sign | static_cast<std::uint8_t>((rounded - 0x3c000000u) >> 20);
}

float float_from_fp8(std::uint8_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24;
  const std::uint32_t magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude < 8) {
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return sign ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + 0x3c000000u));
}

void encode(DType dtype, std::span<const float> values, void* out) {
  if (is_integer(dtype)) {
    encode_integers(dtype, values, out);
    return;
  }
  if (dtype == DType::f32) {
    std::memcpy(out, values.data(), values.size_bytes());
    return;
  }
  if (dtype == DType::fp8) {
    auto* bytes = static_cast<std::uint8_t*>(out);
    for (std::size_t i = 0; i < values.size(); ++i) bytes[i] = fp8_from_float(values[i]);
    return;
  }
  auto* halves = static_cast<std::uint16_t*>(out);
  for (std::size_t i = 0; i < values.size(); ++i)
    halves[i] = dtype == DType::bf16 ? bf16_from_float(values[i]) : fp16_from_float(values[i]);
}

void encode(DType dtype, std::span<const double> values, void* out) {
  if (is_integer(dtype)) {
    encode_integers(dtype, values, out);
    return;
  }
  const std::vector<float> singles(values.begin(), values.end());
  encode(dtype, std::span<const float>(singles), out);
}

void decode(DType dtype, const void* in, std::span<float> values) {
  if (is_integer(dtype)) {
    decode_integers(dtype, in, values);
    return;
  }
  if (dtype == DType::f32) {
    std::memcpy(values.data(), in, values.size_bytes());
    return;
  }
  if (dtype == DType::fp8) {
    const auto* bytes = static_cast<const std::uint8_t*>(in);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = float_from_fp8(bytes[i]);
    return;
  }
  const auto* halves = static_cast<const std::uint16_t*>(in);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = dtype == DType::bf16 ? float_from_bf16(halves[i]) : float_from_fp16(halves[i]);
}

void decode(DType dtype, const void* in, std::span<double> values) {
  if (is_integer(dtype)) {
    decode_integers(dtype, in, values);
    return;
  }
  std::vector<float> singles(values.size());
  decode(dtype, in, std::span<float>(singles));
  std::copy(singles.begin(), singles.end(), values.begin());
}

double round_to(DType dtype, double value) {
  const auto single = static_cast<float>(value);
  switch (dtype) {
    case DType::f32:
      return single;
    case DType::bf16:
      return float_from_bf16(bf16_from_float(single));
    case DType::fp16:
      return float_from_fp16(fp16_from_float(single));
    case DType::fp8:
      return float_from_fp8(fp8_from_float(single));
    case DType::u8:
      return nearest<std::uint8_t>(value);
    case DType::i8:
      return nearest<std::int8_t>(value);
    case DType::i32:
      return nearest<std::int32_t>(value);
    case DType::i64:
      return static_cast<double>(nearest<std::int64_t>(value));
  }
  throw Error(ErrorKind::internal, "round_to: a value outside the enumeration");
}

}  // namespace fftune
