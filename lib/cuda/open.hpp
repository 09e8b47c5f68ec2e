// The way into the CUDA backend; needs none of the toolkit's headers.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "device/backend.hpp"
#include "device/facts.hpp"

namespace fftune {

class SourceSet;

struct CudaOptions {
  std::filesystem::path cache_folder;                  // compiled kernels go below it; empty: none
  std::vector<std::filesystem::path> toolkit_folders;  // searched for libraries after the loader
  std::filesystem::path nccl = {};    // libnccl; empty: the loader's, or one of those folders
  std::filesystem::path bundle = {};  // of compiled kernels; empty: none
  bool no_jit = false;                // compile nothing: it is an error instead
};

struct CudaDevices {
  std::vector<DeviceFacts> found;  // by ordinal
  /// What is missing, and what to do about it: a driver, a device, NVRTC (without which devices are
  /// found but cannot be opened). One line each.
  std::vector<std::string> unavailable;
};

/// Never throws for a machine that lacks something.
CudaDevices list_cuda_devices(const CudaOptions& options);

/// Opens a device's primary context. `sources` must outlive the backend. With a bundle, NVRTC is
/// opened when a kernel is not in it. Throws Error(unavailable) if the driver, NVRTC or the device
/// is missing, naming what to install; what is thrown for a bundle that cannot be read; and
/// Error(unavailable) for one of other architectures where nothing can be compiled.
std::unique_ptr<Backend> open_cuda(int ordinal, const SourceSet& sources,
                                   const CudaOptions& options);

/// Compiles for `arch` ("sm_90a") with NVRTC alone: no driver, no GPU. `sources` must outlive it.
/// Throws Error(unavailable) if NVRTC is missing, Error(invalid_input) for an unknown architecture.
std::unique_ptr<Compiler> make_cuda_compiler(const std::string& arch, const SourceSet& sources,
                                             const CudaOptions& options);

/// Collects compiled kernels for a bundle.
class BundleBuilder {
 public:
  virtual ~BundleBuilder() = default;
  /// Compiles the program's kernels for `arch`, or takes them from the cache. A failure is a
  /// result. Any thread may call it.
  virtual CompileReport add(const std::string& arch, const Program& program) = 0;
  virtual std::size_t kernels() const = 0;
  /// The bundle's file.
  virtual std::string bytes() const = 0;
};

/// As make_cuda_compiler(), for any of the architectures.
std::unique_ptr<BundleBuilder> make_bundle_builder(const SourceSet& sources,
                                                   const CudaOptions& options);

}  // namespace fftune
