// A kernel that does nothing for a while.
//
// The device runs it while the host submits what is to be timed, so that the time between two
// events holds none of the host's own.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "cuda/context.hpp"
#include "cuda/kernel_pool.hpp"
#include "cuda/nvrtc.hpp"

namespace fftune::cuda {

/// Its one parameter is a std::int64_t, the clock cycles to wait. Throws Error(unavailable) if it
/// does not compile.
std::shared_ptr<const LoadedKernel> load_delay_kernel(const SharedContext& context,
                                                      const std::shared_ptr<const Nvrtc>& nvrtc,
                                                      const std::string& arch,
                                                      const std::filesystem::path& cache_folder);

}  // namespace fftune::cuda
