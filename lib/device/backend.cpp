#include "device/backend.hpp"

namespace fftune {

int CompileReport::spill_bytes() const {
  int bytes = 0;
  for (const auto& kernel : kernels) bytes += kernel.spill_bytes;
  return bytes;
}

}  // namespace fftune
