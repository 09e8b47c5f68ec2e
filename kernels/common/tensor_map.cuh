// A tensor map (TMA descriptor) as a kernel receives it, by value in a __grid_constant__ parameter:
// the 128 bytes that cuTensorMapEncodeTiled writes. Included by host and device code.
#pragma once

namespace fftune {

struct alignas(64) tensor_map {
  unsigned long long opaque[16];
};

}  // namespace fftune
