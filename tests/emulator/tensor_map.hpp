// The emulator's layout of a CUtensorMap.
#pragma once

#include <cstdint>

namespace fftune::emulator {

struct TensorMap {
  std::uint64_t address = 0;  // at the front, where cuTensorMapReplaceAddress writes it
  std::uint64_t sizes[5] = {}, strides[5] = {};  // innermost first; strides in bytes
  std::uint16_t box[5] = {};
  std::uint8_t rank = 0, element_bytes = 0, swizzle_bytes = 0;
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace fftune::emulator
