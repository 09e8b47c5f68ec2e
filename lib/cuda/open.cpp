#include "cuda/open.hpp"

#include <fmt/format.h>

#include <map>
#include <mutex>
#include <utility>

#include "core/error.hpp"
#include "cuda/backend.hpp"
#include "cuda/bundle.hpp"
#include "cuda/context.hpp"
#include "cuda/driver.hpp"
#include "cuda/facts.hpp"
#include "cuda/kernel_compiler.hpp"
#include "cuda/nvrtc.hpp"

namespace fftune {
namespace cuda {
namespace {

/// Throws Error(unavailable) where a bundle of other architectures is all that there is.
void require_compiling(const KernelOrigins& origins, const std::string& arch,
                       const SourceSet& sources) {
  const auto complaint = origins.bundle->complaint(arch, sources);
  if (origins.no_jit)
    throw Error(ErrorKind::unavailable,
                fmt::format("{} (compiling is switched off: FFTUNE_NO_JIT)", complaint));
  try {
    check_supported(*origins.nvrtc->get(), arch);
  } catch (const Error& error) {
    throw Error(ErrorKind::unavailable, fmt::format("{}; {}", complaint, error.what()));
  }
}

class CubinBundleBuilder final : public BundleBuilder {
 public:
  CubinBundleBuilder(std::shared_ptr<const Nvrtc> nvrtc, const SourceSet& sources,
                     std::filesystem::path cache_folder)
      : nvrtc_(std::move(nvrtc)), sources_(sources), cache_folder_(std::move(cache_folder)) {}

  CompileReport add(const std::string& arch, const Program& program) override {
    const KernelCompiler& compiler = compiler_for(arch);
    CompileReport report;
    report.cached = true;
    for (const auto& source : program.kernels) {
      const BundleKey key{arch, source.file, source.expression};
      {
        const std::lock_guard lock(mutex_);
        if (kernels_.contains(key)) continue;
      }
      auto outcome = compiler.compile(source);
      report.seconds += outcome.seconds;
      report.cached = report.cached && outcome.cached;
      report.kernels.push_back(outcome.kernel.report);
      if (!outcome.failure.empty()) {
        report.failure = std::move(outcome.failure);
        return report;
      }
      const std::lock_guard lock(mutex_);
      kernels_[key] = {sources_.hash({source.file}), std::move(outcome.kernel)};
    }
    return report;
  }

  std::size_t kernels() const override {
    const std::lock_guard lock(mutex_);
    return kernels_.size();
  }

  std::string bytes() const override {
    const std::lock_guard lock(mutex_);
    return encode_bundle(kernels_, FFTUNE_VERSION, nvrtc_->version());
  }

 private:
  const KernelCompiler& compiler_for(const std::string& arch) {
    const std::lock_guard lock(mutex_);
    auto& compiler = compilers_[arch];
    if (!compiler)
      compiler = std::make_unique<KernelCompiler>(nvrtc_, arch, sources_, cache_folder_);
    return *compiler;
  }

  std::shared_ptr<const Nvrtc> nvrtc_;
  const SourceSet& sources_;
  std::filesystem::path cache_folder_;
  mutable std::mutex mutex_;  // guards what follows
  std::map<std::string, std::unique_ptr<KernelCompiler>> compilers_;
  std::map<BundleKey, BundledKernel> kernels_;
};

}  // namespace
}  // namespace cuda

CudaDevices list_cuda_devices(const CudaOptions& options) {
  CudaDevices devices;
  std::string toolkit;
  try {
    const auto driver = cuda::open_driver();
    // With a bundle it may be missing, and is opened where it is needed.
    if (options.bundle.empty()) try {
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
  cuda::KernelOrigins origins;
  origins.cache_folder = options.cache_folder;
  origins.no_jit = options.no_jit;
  origins.nvrtc = std::make_shared<cuda::LazyNvrtc>(
      [folders = options.toolkit_folders, newest = driver->version / 1000] {
        return cuda::open_nvrtc(folders, newest);
      });
  std::string toolkit;
  if (options.bundle.empty())
    toolkit = origins.nvrtc->get()->version();
  else
    origins.bundle = std::make_shared<const cuda::Bundle>(options.bundle);
  auto context = std::make_shared<const cuda::Context>(driver, ordinal);
  auto facts = cuda::read_facts(*driver, ordinal, toolkit);
  if (!origins.bundle)
    cuda::check_supported(*origins.nvrtc->get(), facts.arch);
  else if (!origins.bundle->archs().contains(facts.arch))
    cuda::require_compiling(origins, facts.arch, sources);
  return std::make_unique<cuda::CudaBackend>(std::move(context), std::move(origins),
                                             std::move(facts), sources, options);
}

std::unique_ptr<Compiler> make_cuda_compiler(const std::string& arch, const SourceSet& sources,
                                             const CudaOptions& options) {
  return std::make_unique<cuda::OfflineCompiler>(cuda::open_nvrtc(options.toolkit_folders), arch,
                                                 sources, options.cache_folder);
}

std::unique_ptr<BundleBuilder> make_bundle_builder(const SourceSet& sources,
                                                   const CudaOptions& options) {
  return std::make_unique<cuda::CubinBundleBuilder>(cuda::open_nvrtc(options.toolkit_folders),
                                                    sources, options.cache_folder);
}

}  // namespace fftune
