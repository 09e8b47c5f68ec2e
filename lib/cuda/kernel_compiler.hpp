// From a kernel's source to its cubin, by NVRTC and through the cache.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/cubin_cache.hpp"
#include "cuda/nvrtc.hpp"
#include "cuda/open.hpp"
#include "device/program.hpp"
#include "device/sources.hpp"

namespace fftune::cuda {

struct CompileOutcome {
  CompiledKernel kernel;
  double seconds = 0;   // in the compiler; 0 from the cache
  bool cached = false;  // from the disk
  std::string failure;  // one line; empty on success
};

/// Any number of threads may use it at once.
class KernelCompiler {
 public:
  /// Throws Error(invalid_input) if NVRTC does not know `arch`. `sources` must outlive this.
  KernelCompiler(std::shared_ptr<const Nvrtc> nvrtc, std::string arch, const SourceSet& sources,
                 const std::filesystem::path& cache_folder);

  CompileOutcome compile(const KernelSource& source) const;

  const std::string& arch() const { return arch_; }
  const CubinCache& cache() const { return cache_; }
  std::vector<std::string> warnings() const;

 private:
  std::string cache_key(const KernelSource& source, const std::vector<std::string>& closure) const;
  CompileOutcome build(const KernelSource& source, const std::vector<std::string>& closure) const;

  std::shared_ptr<const Nvrtc> nvrtc_;
  std::string arch_;
  const SourceSet& sources_;
  CubinCache cache_;
  std::vector<std::string> options_;
};

}  // namespace fftune::cuda
