// The header of a safetensors file: its tensors, and their places.
//
//   8 bytes    N, the length of the header, little-endian
//   N bytes    JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, …} and
//              maybe "__metadata__": {"key": "text", …}; spaces may follow
//   the rest   the tensors' bytes, row-major and little-endian, without a hole or an overlap
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.hpp"

namespace fftune {

// Element types of saved tensors, as safetensors names them.

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

struct SavedTensor {
  std::string name;
  Element element = Element::f32;
  std::vector<std::int64_t> shape;  // row-major; empty: one element
  std::size_t begin = 0;            // its bytes in the file: [begin, end)
  std::size_t end = 0;

  std::int64_t elements() const;
};

/// How many bytes of the file the header and its length take, from the first bytes of the file: 8,
/// or as many as it has. Throws Error(invalid_input) like read_safetensors_header().
std::size_t safetensors_header_end(std::span<const std::byte> start, std::uint64_t file_bytes);

/// The tensors of a file, from its bytes up to safetensors_header_end(), in the order of their
/// bytes. Each lies within the file and has as many bytes as its shape says. Throws
/// Error(invalid_input) with one line that says what is wrong, without the file's name.
std::vector<SavedTensor> read_safetensors_header(std::span<const std::byte> start,
                                                 std::uint64_t file_bytes);

/// "[2, 3]".
std::string shape_text(const std::vector<std::int64_t>& shape);

}  // namespace fftune
