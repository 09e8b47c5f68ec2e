#include "cuda/session.hpp"

#include <cstdint>
#include <utility>

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

}  // namespace fftune::cuda
