#include "cuda/session.hpp"

#include <cstdint>
#include <map>
#include <utility>

#include "core/error.hpp"
#include "cuda/kernel_compiler.hpp"

namespace fftune::cuda {

Session::Session(SharedContext context, double clock_hz, LoadDelay load_delay)
    : context_(std::move(context)),
      stream_(make_stream(context_)),
      placeholder_(allocate(context_, 256)),
      clock_hz_(clock_hz > 0 ? clock_hz : 1e9),
      load_delay_(std::move(load_delay)) {}

void Session::synchronize() const {
  driver().check(driver().stream_synchronize(stream()), "cuStreamSynchronize");
}

void Session::enqueue_delay(double seconds) const {
  CUfunction function = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (delay_ == nullptr) delay_ = load_delay_();
    function = delay_->function();
  }
  auto cycles = static_cast<std::int64_t>(seconds * clock_hz_);
  void* arguments[] = {&cycles};
  driver().check(
      driver().launch_kernel(function, 1, 1, 1, 1, 1, 1, 0, stream(), arguments, nullptr),
      "launch of the delay before a timing");
}

void copy(const Session& session, void* to, const void* from, std::size_t bytes) {
  const Driver& driver = session.driver();
  driver.check(
      driver.memcpy_dtod_async(device_address(to), device_address(from), bytes, session.stream()),
      "cuMemcpyDtoD");
}

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
