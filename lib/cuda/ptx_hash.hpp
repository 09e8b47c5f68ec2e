// The PTX that a cubin was assembled from, which is in it for profilers.
#pragma once

#include <string>
#include <string_view>

namespace fftune::cuda {

/// The hash of a cubin's PTX (--generate-line-info keeps it there) without lines of sources, names
/// for debuggers, mangled names, numbers of registers, and globals that the kernel does not use:
/// sixteen hex digits. Kernels with the same hash are the same instructions to the assembler,
/// whatever their sources say. Throws Error(internal) for an image without PTX.
std::string ptx_hash(std::string_view cubin);

}  // namespace fftune::cuda
