// Structs of the C API that later versions may extend: each begins with its size.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/error.hpp"

namespace fftune {

/// The struct as this version has it: zeros where the caller's is shorter, which is of an older
/// header. Throws Error(invalid_input) for one that is longer and not zero there, or has no size.
template <typename Struct>
Struct read_struct(const Struct& given, const char* name, std::size_t least_bytes) {
  std::size_t bytes = 0;
  std::memcpy(&bytes, &given, sizeof bytes);
  if (bytes < least_bytes || bytes > std::size_t{4096})
    throw Error(ErrorKind::invalid_input,
                fmt::format("{0}.struct_size is {1}: set it to sizeof({0})", name, bytes));
  const auto* const begin = reinterpret_cast<const unsigned char*>(&given);
  if (bytes > sizeof(Struct) && std::any_of(begin + sizeof(Struct), begin + bytes,
                                            [](unsigned char byte) { return byte != 0; }))
    throw Error(ErrorKind::invalid_input,
                fmt::format("{} has fields that this version of fftune, {}, does not know: update "
                            "the library",
                            name, FFTUNE_VERSION));
  Struct own{};
  std::memcpy(&own, &given, std::min(bytes, sizeof own));
  return own;
}

}  // namespace fftune
