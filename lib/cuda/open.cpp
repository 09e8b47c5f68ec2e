#include "cuda/open.hpp"

#include "core/error.hpp"
#include "cuda/backend.hpp"
#include "cuda/context.hpp"
#include "cuda/driver.hpp"
#include "cuda/facts.hpp"
#include "cuda/nvrtc.hpp"
#include "cuda/offline_compiler.hpp"

namespace fftune {

CudaDevices list_cuda_devices(const CudaOptions& options) {
  CudaDevices devices;
  std::string toolkit;
  try {
    const auto driver = cuda::open_driver();
    try {
      toolkit = cuda::open_nvrtc(options.toolkit_folders, driver->version / 1000)->version();
    } catch (const Error& error) {
      devices.unavailable.emplace_back(error.what());
    }
    int count = 0;
    driver->check(driver->device_get_count(&count), "cuDeviceGetCount");
    for (int ordinal = 0; ordinal < count; ++ordinal)
      devices.found.push_back(cuda::read_facts(*driver, ordinal, toolkit));
  } catch (const Error& error) {
    devices.unavailable.emplace_back(error.what());
  }
  return devices;
}

std::unique_ptr<Backend> open_cuda(int ordinal, const SourceSet& sources,
                                   const CudaOptions& options) {
  const auto driver = cuda::open_driver();
  auto nvrtc = cuda::open_nvrtc(options.toolkit_folders, driver->version / 1000);
  auto context = std::make_shared<const cuda::Context>(driver, ordinal);
  auto facts = cuda::read_facts(*driver, ordinal, nvrtc->version());
  return std::make_unique<cuda::CudaBackend>(std::move(context), std::move(nvrtc), std::move(facts),
                                             sources, options);
}

std::unique_ptr<Compiler> make_cuda_compiler(const std::string& arch, const SourceSet& sources,
                                             const CudaOptions& options) {
  return std::make_unique<cuda::OfflineCompiler>(cuda::open_nvrtc(options.toolkit_folders), arch,
                                                 sources, options.cache_folder);
}

}  // namespace fftune
