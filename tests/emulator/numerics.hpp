// Element types of PTX that C++ lacks, and their conversions.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace fftune::emulator {

inline float float_of_half(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16;
  const std::uint32_t rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // Exponents differ by 112; the multiplication makes subnormal numbers normal.
  const float value = std::bit_cast<float>(rest << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
}

/// To nearest, ties to even, with `mantissa` bits and exponents from `least`; no overflow.
inline double round_to_bits(double value, int mantissa, int least) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), least);
  return std::ldexp(std::nearbyint(std::ldexp(value, mantissa - exponent)), exponent - mantissa);
}

/// The bits of a number that is rounded so, without its sign: exponents are stored from 1 on.
inline int bits_of_rounded(double rounded, int mantissa, int least) {
  const int exponent = std::ilogb(rounded);
  if (exponent < least) return static_cast<int>(std::ldexp(rounded, mantissa - least));
  return (exponent - least) * (1 << mantissa) +
         static_cast<int>(std::ldexp(rounded, mantissa - exponent));
}

inline std::uint16_t half_of(double value) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return 0x7fff;
  const double rounded = round_to_bits(std::fabs(value), 10, -14);
  return static_cast<std::uint16_t>(sign |
                                    (rounded > 65504 ? 0x7c00 : bits_of_rounded(rounded, 10, -14)));
}

inline std::uint16_t bfloat_of(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  return static_cast<std::uint16_t>(is_nan ? 0x7fff : rounded);
}

struct half {
  std::uint16_t bits = 0;
  half() = default;
  half(double value) : bits(half_of(value)) {}
  operator float() const { return float_of_half(bits); }
};

struct bfloat {
  std::uint16_t bits = 0;
  bfloat() = default;
  bfloat(float value) : bits(bfloat_of(value)) {}
  operator float() const { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
};

template <class T>
struct two {
  T low, high;
};

inline float float_of_e4m3(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  if ((bits & 0x7f) == 0x7f) value = std::nanf("");
  return (bits & 0x80) != 0 ? -value : value;
}

/// To nearest; past the largest, the largest.
inline std::uint8_t e4m3_of(float value) {
  const int sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return 0x7f;
  const double rounded = round_to_bits(std::fabs(value), 3, -6);
  return static_cast<std::uint8_t>(sign |
                                   (rounded >= 448 ? 0x7e : bits_of_rounded(rounded, 3, -6)));
}

/// To the nearest number with 10 bits of mantissa, ties away from zero.
inline std::uint32_t tf32_of(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return std::isfinite(value) ? (bits + 0x1000u) & ~0x1fffu : bits;
}

}  // namespace fftune::emulator
