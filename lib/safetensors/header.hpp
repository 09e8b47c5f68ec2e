// The header of a safetensors file: its tensors, and their places.
//
//   8 bytes    N, the length of the header, little-endian
//   N bytes    JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, …} and
//              maybe "__metadata__": {"key": "text", …}; spaces may follow
//   the rest   the tensors' bytes, row-major and little-endian, without a hole or an overlap
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "safetensors/element.hpp"

namespace fftune {

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
