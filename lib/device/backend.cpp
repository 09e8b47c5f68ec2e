#include "device/backend.hpp"

namespace fftune {

int CompileReport::spill_bytes() const {
  int bytes = 0;
  for (const auto& kernel : kernels) bytes += kernel.spill_bytes;
  return bytes;
}

std::size_t Backend::workspace_bytes(const Program& program) const {
  constexpr std::size_t alignment = 256;
  std::size_t bytes = 0;
  for (const auto& scratch : program.scratch)
    bytes += (scratch.bytes + alignment - 1) / alignment * alignment;
  return bytes;
}

}  // namespace fftune
