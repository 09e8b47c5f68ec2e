#include "cuda/delay.hpp"

#include <map>
#include <utility>

#include "core/error.hpp"
#include "cuda/kernel_compiler.hpp"

namespace fftune::cuda {
namespace {

constexpr const char* delay_source = R"(
extern "C" __global__ void delay(long long cycles) {
  long long start, now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now));
  } while (now - start < cycles);
}
)";

}  // namespace

std::shared_ptr<const LoadedKernel> load_delay_kernel(const SharedContext& context,
                                                      const std::shared_ptr<const Nvrtc>& nvrtc,
                                                      const std::string& arch,
                                                      const std::filesystem::path& cache_folder) {
  const SourceSet sources(std::map<std::string, std::string>{{"delay.cu", delay_source}});
  const KernelCompiler compiler(nvrtc, arch, sources, cache_folder);
  auto outcome = compiler.compile({"delay.cu", "delay"});
  if (!outcome.failure.empty()) throw Error(ErrorKind::unavailable, outcome.failure);
  return std::make_shared<const LoadedKernel>(context, std::move(outcome.kernel));
}

}  // namespace fftune::cuda
