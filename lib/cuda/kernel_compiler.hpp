// From a kernel's source to its cubin, by NVRTC and through the cache.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/bundle.hpp"
#include "cuda/cubin_cache.hpp"
#include "cuda/nvrtc.hpp"
#include "cuda/open.hpp"
#include "device/backend.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"
#include "device/sources.hpp"

namespace fftune::cuda {

struct CompileOutcome {
  CompiledKernel kernel;
  double seconds = 0;   // in the compiler; 0 from the cache
  bool cached = false;  // from the disk
  std::string failure;  // one line; empty on success
};

/// Sources of compiled kernels, in this order: a bundle, the cache, NVRTC.
struct KernelOrigins {
  std::shared_ptr<const Bundle> bundle;  // null: none
  std::filesystem::path cache_folder;    // empty: none
  std::shared_ptr<LazyNvrtc> nvrtc;
  bool no_jit = false;  // NVRTC compiles nothing
};

/// A cache, and NVRTC that is open.
KernelOrigins compiled_by(std::shared_ptr<const Nvrtc> nvrtc, std::filesystem::path cache_folder);

/// Throws Error(invalid_input) if NVRTC does not know `arch`.
void check_supported(const Nvrtc& nvrtc, const std::string& arch);

/// Any number of threads may use it at once.
class KernelCompiler {
 public:
  /// NVRTC is opened when a kernel is not in the bundle. `sources` must outlive this.
  KernelCompiler(KernelOrigins origins, std::string arch, const SourceSet& sources);
  /// Throws Error(invalid_input) if NVRTC does not know `arch`. `sources` must outlive this.
  KernelCompiler(std::shared_ptr<const Nvrtc> nvrtc, std::string arch, const SourceSet& sources,
                 const std::filesystem::path& cache_folder);

  CompileOutcome compile(const KernelSource& source) const;

  CompileCounters counters() const;
  const std::string& arch() const { return arch_; }
  const CubinCache& cache() const { return cache_; }
  std::vector<std::string> warnings() const;

 private:
  std::string cache_key(const Nvrtc& nvrtc, const KernelSource& source,
                        const std::vector<std::string>& closure) const;
  CompileOutcome from_bundle(const KernelSource& source) const;
  CompileOutcome compile_by(const Nvrtc& nvrtc, const KernelSource& source) const;
  CompileOutcome build(const Nvrtc& nvrtc, const KernelSource& source,
                       const std::vector<std::string>& closure) const;
  const std::string& code_hash(const std::string& file) const;

  KernelOrigins origins_;
  std::string arch_;
  const SourceSet& sources_;
  CubinCache cache_;
  std::vector<std::string> options_;
  mutable std::mutex mutex_;  // guards the two below
  mutable std::map<std::string, std::string> code_hashes_;
  mutable CompileCounters counters_;
};

// Compiling programs for an architecture that need not be here.

class OfflineCompiler final : public Compiler {
 public:
  OfflineCompiler(std::shared_ptr<const Nvrtc> nvrtc, const std::string& arch,
                  const SourceSet& sources, const std::filesystem::path& cache_folder);
  CompileReport compile(const Program& program) override;
  std::vector<std::string> warnings() const override { return compiler_.warnings(); }

 private:
  DeviceFacts facts_;
  KernelCompiler compiler_;
};

}  // namespace fftune::cuda
