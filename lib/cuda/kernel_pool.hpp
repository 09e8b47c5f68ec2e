// Loaded kernels, shared by the programs that use them.
#pragma once

#include <cuda.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cuda/context.hpp"
#include "cuda/kernel_compiler.hpp"
#include "device/backend.hpp"
#include "device/program.hpp"

namespace fftune::cuda {

/// A kernel in its module.
class LoadedKernel {
 public:
  /// Throws Error(unavailable) if the driver does not take the image.
  LoadedKernel(const SharedContext& context, CompiledKernel compiled);

  CUfunction function() const { return function_; }
  const KernelReport& report() const { return report_; }
  int attribute(CUfunction_attribute attribute) const;
  /// Allows launches with this much dynamic shared memory, and clusters of more than 8 blocks.
  /// Throws Error(unavailable) if the driver refuses.
  void allow(std::uint32_t shared_bytes, bool large_cluster) const;
  /// The kernel's parameter sizes disagree with the launch's: how; empty if they agree or the
  /// driver cannot tell.
  std::string parameter_failure(const KernelLaunch& launch) const;

 private:
  Owned<CUmodule> module_;
  CUfunction function_ = nullptr;
  KernelReport report_;
  mutable std::mutex mutex_;
  mutable std::uint32_t allowed_shared_bytes_ = 0;
};

struct LoadOutcome {
  std::shared_ptr<const LoadedKernel> kernel;  // null if `failure` says why
  KernelReport report;
  double seconds = 0;
  bool cached = false;
  std::string failure;
};

/// Compiles and loads each kernel once for as long as a program holds it. Any thread may use it.
class KernelPool {
 public:
  KernelPool(SharedContext context, const KernelCompiler& compiler)
      : context_(std::move(context)), compiler_(compiler) {}
  LoadOutcome load(const KernelSource& source);

 private:
  struct Entry {
    std::mutex mutex;  // held while it is compiled, so that one thread does and the others wait
    std::weak_ptr<const LoadedKernel> kernel;
  };
  std::shared_ptr<Entry> entry(const KernelSource& source);

  SharedContext context_;
  const KernelCompiler& compiler_;
  std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, std::shared_ptr<Entry>> entries_;
};

}  // namespace fftune::cuda
