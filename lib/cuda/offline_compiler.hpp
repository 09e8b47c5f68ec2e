// Compiling programs for an architecture that need not be here.
#pragma once

#include <string>
#include <vector>

#include "cuda/kernel_compiler.hpp"
#include "device/compiler.hpp"
#include "device/facts.hpp"

namespace fftune::cuda {

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
