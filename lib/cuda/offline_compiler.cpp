#include "cuda/offline_compiler.hpp"

#include <fmt/format.h>

#include "core/error.hpp"
#include "cuda/launch_limits.hpp"

namespace fftune::cuda {

OfflineCompiler::OfflineCompiler(std::shared_ptr<const Nvrtc> nvrtc, const std::string& arch,
                                 const SourceSet& sources,
                                 const std::filesystem::path& cache_folder)
    : facts_(facts_of_architecture(arch)),
      compiler_(std::move(nvrtc), arch, sources, cache_folder) {}

CompileReport OfflineCompiler::compile(const Program& program) {
  CompileReport report;
  report.cached = true;
  for (const auto& source : program.kernels) {
    auto outcome = compiler_.compile(source);
    report.seconds += outcome.seconds;
    report.cached = report.cached && outcome.cached;
    report.kernels.push_back(std::move(outcome.kernel.report));
    if (!outcome.failure.empty()) {
      report.failure = std::move(outcome.failure);
      return report;
    }
  }
  for (const auto& step : program.steps) {
    const auto* launch = std::get_if<KernelLaunch>(&step);
    if (launch == nullptr) continue;
    if (launch->kernel >= report.kernels.size())
      throw Error(ErrorKind::internal, fmt::format("a launch of kernel {} of {}", launch->kernel,
                                                   report.kernels.size()));
    const auto& kernel = report.kernels[launch->kernel];
    const auto reason =
        launch_failure(*launch, {kernel.registers, kernel.static_shared_bytes}, facts_);
    if (reason.empty()) continue;
    report.failure = fmt::format("{}: {}", kernel.name, reason);
    break;
  }
  return report;
}

}  // namespace fftune::cuda
