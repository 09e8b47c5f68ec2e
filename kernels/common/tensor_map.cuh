// A tensor map as kernels take it, by value in a __grid_constant__ parameter: the 128 bytes that
// cuTensorMapEncodeTiled fills in. Host and device include this file alike.
#pragma once

namespace fftune {

struct alignas(64) tensor_map {
  unsigned long long opaque[16];
};

}  // namespace fftune
