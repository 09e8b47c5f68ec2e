#include "core/dtype.hpp"

#include <bit>
#include <cmath>
#include <random>
#include <span>
#include <vector>

#include "core/error.hpp"
#include "support/catch.hpp"

using namespace fftune;

TEST_CASE("every half-precision number survives a round trip") {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float from_bf16 = float_from_bf16(half);
    const float from_fp16 = float_from_fp16(half);
    if (!std::isnan(from_bf16)) REQUIRE(bf16_from_float(from_bf16) == half);
    if (!std::isnan(from_fp16)) REQUIRE(fp16_from_float(from_fp16) == half);
    REQUIRE(std::isnan(from_bf16) == std::isnan(float_from_bf16(bf16_from_float(from_bf16))));
    REQUIRE(std::isnan(from_fp16) == std::isnan(float_from_fp16(fp16_from_float(from_fp16))));
  }
}

TEST_CASE("rounding goes to the nearest half, ties to even") {
  std::mt19937 random(7);
  std::uniform_int_distribution<std::uint32_t> any;
  const auto nearest = [](float value, float candidate, float below, float above) {
    const double error = std::abs(double{candidate} - value);
    return error <= std::abs(double{below} - value) && error <= std::abs(double{above} - value);
  };
  for (int i = 0; i < 200000; ++i) {
    const float value = std::bit_cast<float>(any(random));
    if (!std::isfinite(value)) continue;
    const std::uint16_t b = bf16_from_float(value);
    if ((b & 0x7fff) > 0 && (b & 0x7fff) < 0x7f7f)
      REQUIRE(nearest(value, float_from_bf16(b), float_from_bf16(b - 1), float_from_bf16(b + 1)));
    if (std::abs(value) < 65000.0f && (fp16_from_float(value) & 0x7fff) > 0) {
      const std::uint16_t h = fp16_from_float(value);
      REQUIRE(nearest(value, float_from_fp16(h), float_from_fp16(h - 1), float_from_fp16(h + 1)));
    }
  }
  REQUIRE(bf16_from_float(1.0f + 0x1p-8f) == 0x3f80);      // a tie: to even, down
  REQUIRE(bf16_from_float(1.0f + 3 * 0x1p-8f) == 0x3f82);  // a tie: to even, up
  REQUIRE(fp16_from_float(65519.0f) == 0x7bff);
  REQUIRE(fp16_from_float(65520.0f) == 0x7c00);
  REQUIRE(fp16_from_float(-1e-30f) == 0x8000);
}

TEST_CASE("every fp8 number survives a round trip, and what is beyond 448 becomes 448") {
  for (unsigned bits = 0; bits < 0x100; ++bits) {
    const auto byte = static_cast<std::uint8_t>(bits);
    const float value = float_from_fp8(byte);
    REQUIRE(std::isnan(value) == ((bits & 0x7f) == 0x7f));
    REQUIRE(fp8_from_float(value) == byte);
    if (std::isnan(value) || (bits & 0x7f) >= 0x7e || bits > 0x7f) continue;
    const float next = float_from_fp8(static_cast<std::uint8_t>(bits + 1));
    const float middle = (value + next) / 2;
    REQUIRE(fp8_from_float(middle) == (bits % 2 == 0 ? bits : bits + 1));  // ties to even
    REQUIRE(fp8_from_float(std::nextafter(middle, 0.0f)) == bits);
    REQUIRE(fp8_from_float(std::nextafter(middle, 1e3f)) == bits + 1);
  }
  REQUIRE(float_from_fp8(0x01) == 0x1p-9f);
  REQUIRE(float_from_fp8(0x38) == 1.0f);
  REQUIRE(float_from_fp8(0x7e) == 448.0f);
  for (const float large : {449.0f, 1e9f, HUGE_VALF}) REQUIRE(fp8_from_float(large) == 0x7e);
  REQUIRE(fp8_from_float(-500.0f) == 0xfe);
  const float values[] = {1.0f, -3.0f, 1000.0f};
  std::uint8_t bytes[3];
  encode(DType::fp8, values, bytes);
  float back[3];
  decode(DType::fp8, bytes, back);
  REQUIRE((back[0] == 1.0f && back[1] == -3.0f && back[2] == 448.0f));
  REQUIRE(round_to(DType::fp8, 1.05) == 1.0);
}

TEST_CASE("names of element types") {
  for (const DType dtype : {DType::f32, DType::bf16, DType::fp16, DType::fp8})
    REQUIRE(parse_dtype(dtype_name(dtype)) == dtype);
  REQUIRE_THROWS_AS(parse_dtype("float"), Error);
}

TEST_CASE("integers are kept exactly as double, and what is beyond them becomes their end") {
  const std::vector<double> values{0, -1, 127, 128, -129, 2.5, 3.5, 2147483647, 1e18, -1e300};
  const auto round_trip = [&](DType dtype) {
    std::vector<std::byte> bytes(values.size() * dtype_bytes(dtype));
    encode(dtype, std::span<const double>(values), bytes.data());
    std::vector<double> back(values.size());
    decode(dtype, bytes.data(), std::span<double>(back));
    return back;
  };
  using Values = std::vector<double>;
  CHECK(round_trip(DType::i8) == Values{0, -1, 127, 127, -128, 2, 4, 127, 127, -128});
  CHECK(round_trip(DType::i32) ==
        Values{0, -1, 127, 128, -129, 2, 4, 2147483647, 2147483647, -2147483648.0});
  CHECK(round_trip(DType::i64) ==
        Values{0, -1, 127, 128, -129, 2, 4, 2147483647, 1e18, -9223372036854775808.0});
  CHECK(round_to(DType::i8, 300) == 127);
  CHECK(round_to(DType::i32, std::nan("")) == 0);
  CHECK(dtype_unit_roundoff(DType::i32) == 0);
  CHECK_THROWS_AS(parse_dtype("i32"), Error);
}
