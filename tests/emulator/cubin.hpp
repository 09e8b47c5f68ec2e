// The PTX in a cubin, and facts of its kernels.
#pragma once

#include <map>
#include <string>

namespace fftune::emulator {

struct CubinFacts {
  std::string ptx;
  std::map<std::string, int> registers;  // of a thread, by kernel
};

/// `image` is an ELF file with its PTX, as NVRTC makes one with --generate-line-info, or PTX
/// itself. Throws std::runtime_error where there is none.
CubinFacts facts_of_cubin(const char* image);

}  // namespace fftune::emulator
