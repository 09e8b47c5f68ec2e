#include "saved/header.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "core/error.hpp"

namespace fftune {
namespace {

struct Row {
  Element element;
  std::string_view name;
  std::size_t bytes;
  std::optional<DType> dtype;  // that has the same bytes
};

constexpr std::array<Row, 16> rows{{{Element::f64, "F64", 8, {}},
                                    {Element::f32, "F32", 4, DType::f32},
                                    {Element::f16, "F16", 2, DType::fp16},
                                    {Element::bf16, "BF16", 2, DType::bf16},
                                    {Element::f8_e4m3, "F8_E4M3", 1, DType::fp8},
                                    {Element::f8_e5m2, "F8_E5M2", 1, {}},
                                    {Element::f8_e8m0, "F8_E8M0", 1, {}},
                                    {Element::i64, "I64", 8, DType::i64},
                                    {Element::i32, "I32", 4, DType::i32},
                                    {Element::i16, "I16", 2, {}},
                                    {Element::i8, "I8", 1, DType::i8},
                                    {Element::u64, "U64", 8, {}},
                                    {Element::u32, "U32", 4, {}},
                                    {Element::u16, "U16", 2, {}},
                                    {Element::u8, "U8", 1, DType::u8},
                                    {Element::boolean, "BOOL", 1, DType::u8}}};

const Row& row_of(Element element) {
  for (const Row& row : rows)
    if (row.element == element) return row;
  throw Error(ErrorKind::internal, "a saved element type outside the enumeration");
}

/// The upper byte of an fp16 number: 5 exponent bits, 2 of mantissa.
double from_e5m2(std::uint8_t bits) {
  return float_from_fp16(static_cast<std::uint16_t>(bits << 8));
}

double from_e8m0(std::uint8_t bits) {
  return bits == 0xff ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, bits - 127);
}

template <typename Stored, typename Convert>
void decode_each(const std::byte* in, std::span<double> values, const Convert& convert) {
  for (double& value : values) {
    Stored stored;
    std::memcpy(&stored, in, sizeof stored);
    in += sizeof stored;
    value = static_cast<double>(convert(stored));
  }
}

template <typename Stored>
void decode_each(const std::byte* in, std::span<double> values) {
  decode_each<Stored>(in, values, [](Stored stored) { return stored; });
}

}  // namespace

static_assert(std::endian::native == std::endian::little, "saved tensors are little-endian");

std::string_view element_name(Element element) {
  return row_of(element).name;
}

std::optional<Element> parse_element(std::string_view name) {
  for (const Row& row : rows)
    if (row.name == name) return row.element;
  return {};
}

std::string_view element_names() {
  static const std::string names = [] {
    std::string all;
    for (const Row& row : rows) all += (all.empty() ? "" : ", ") + std::string(row.name);
    return all;
  }();
  return names;
}

std::size_t element_bytes(Element element) {
  return row_of(element).bytes;
}

std::optional<DType> dtype_of(Element element) {
  return row_of(element).dtype;
}

void decode(Element element, const std::byte* in, std::span<double> values) {
  switch (element) {
    case Element::f64:
      return decode_each<double>(in, values);
    case Element::f32:
      return decode_each<float>(in, values);
    case Element::f16:
      return decode_each<std::uint16_t>(in, values, float_from_fp16);
    case Element::bf16:
      return decode_each<std::uint16_t>(in, values, float_from_bf16);
    case Element::f8_e4m3:
      return decode_each<std::uint8_t>(in, values, float_from_fp8);
    case Element::f8_e5m2:
      return decode_each<std::uint8_t>(in, values, from_e5m2);
    case Element::f8_e8m0:
      return decode_each<std::uint8_t>(in, values, from_e8m0);
    case Element::i64:
      return decode_each<std::int64_t>(in, values);
    case Element::i32:
      return decode_each<std::int32_t>(in, values);
    case Element::i16:
      return decode_each<std::int16_t>(in, values);
    case Element::i8:
      return decode_each<std::int8_t>(in, values);
    case Element::u64:
      return decode_each<std::uint64_t>(in, values);
    case Element::u32:
      return decode_each<std::uint32_t>(in, values);
    case Element::u16:
      return decode_each<std::uint16_t>(in, values);
    case Element::u8:
      return decode_each<std::uint8_t>(in, values);
    case Element::boolean:
      return decode_each<std::uint8_t>(in, values, [](std::uint8_t byte) { return byte != 0; });
  }
}

void convert(Element element, const std::byte* in, DType dtype, std::byte* out, std::size_t count) {
  // A byte of BOOL that is neither 0 nor 1 is 1.
  if (dtype_of(element) == dtype && element != Element::boolean) {
    std::memcpy(out, in, count * dtype_bytes(dtype));
    return;
  }
  std::array<double, 1024> values;
  for (std::size_t done = 0; done < count;) {
    const std::size_t part = std::min(values.size(), count - done);
    const std::span<double> block(values.data(), part);
    decode(element, in + done * element_bytes(element), block);
    encode(dtype, std::span<const double>(block), out + done * dtype_bytes(dtype));
    done += part;
  }
}

}  // namespace fftune
