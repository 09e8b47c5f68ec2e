#include "saved/header.hpp"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "support/catch.hpp"

using namespace fftune;

namespace {

/// At an odd address, as behind a header of any length.
template <typename Stored>
std::vector<double> decoded(Element element, const std::vector<Stored>& stored) {
  std::vector<std::byte> bytes(1 + stored.size() * sizeof(Stored));
  std::memcpy(bytes.data() + 1, stored.data(), stored.size() * sizeof(Stored));
  std::vector<double> values(stored.size());
  decode(element, bytes.data() + 1, values);
  return values;
}

using Values = std::vector<double>;

}  // namespace

TEST_CASE("every element type is known by its name and decoded") {
  CHECK(decoded<double>(Element::f64, {1.0 / 3, -2}) == Values{1.0 / 3, -2});
  CHECK(decoded<float>(Element::f32, {0.5f, -3.25f}) == Values{0.5, -3.25});
  CHECK(decoded<std::uint16_t>(Element::f16, {0x3c00, 0xc200, 0x0001}) ==
        Values{1, -3, std::ldexp(1.0, -24)});
  CHECK(decoded<std::uint16_t>(Element::bf16, {0x3f80, 0xc040}) == Values{1, -3});
  CHECK(decoded<std::uint8_t>(Element::f8_e4m3, {0x38, 0x7e, 0xb8}) == Values{1, 448, -1});
  CHECK(decoded<std::uint8_t>(Element::f8_e5m2, {0x3c, 0x7b, 0xbc}) == Values{1, 57344, -1});
  CHECK(std::isinf(decoded<std::uint8_t>(Element::f8_e5m2, {0x7c})[0]));
  CHECK(decoded<std::uint8_t>(Element::f8_e8m0, {127, 130, 0}) ==
        Values{1, 8, std::ldexp(1.0, -127)});
  CHECK(std::isnan(decoded<std::uint8_t>(Element::f8_e8m0, {255})[0]));
  CHECK(decoded<std::int64_t>(Element::i64, {-5, 1ll << 40}) == Values{-5, std::ldexp(1.0, 40)});
  CHECK(decoded<std::int32_t>(Element::i32, {-5, 1 << 30}) == Values{-5, std::ldexp(1.0, 30)});
  CHECK(decoded<std::int16_t>(Element::i16, {-5, 300}) == Values{-5, 300});
  CHECK(decoded<std::int8_t>(Element::i8, {-5, 100}) == Values{-5, 100});
  CHECK(decoded<std::uint64_t>(Element::u64, {1ull << 63}) == Values{std::ldexp(1.0, 63)});
  CHECK(decoded<std::uint32_t>(Element::u32, {1u << 31}) == Values{std::ldexp(1.0, 31)});
  CHECK(decoded<std::uint16_t>(Element::u16, {65535}) == Values{65535});
  CHECK(decoded<std::uint8_t>(Element::u8, {255}) == Values{255});
  CHECK(decoded<std::uint8_t>(Element::boolean, {0, 1, 2}) == Values{0, 1, 1});
  for (const char* name : {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I64",
                           "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}) {
    const auto element = parse_element(name);
    REQUIRE(element);
    CHECK(element_name(*element) == name);
    CHECK(element_names().find(name) != std::string_view::npos);
  }
  CHECK_FALSE(parse_element("f32"));
  CHECK_FALSE(parse_element("F4"));
}
