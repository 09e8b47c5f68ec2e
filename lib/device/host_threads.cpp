#include "device/host_threads.hpp"

#include <sched.h>

#include <algorithm>
#include <thread>

#include "core/parallel_until.hpp"

namespace fftune {
namespace {

int usable_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return std::max(1, CPU_COUNT(&cores));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

HostThreads::HostThreads() : max_threads_(usable_cores()) {}

void HostThreads::run(int tasks, int threads, const std::function<void(int)>& body) {
  const auto count = [](int value) { return static_cast<std::size_t>(std::max(0, value)); };
  parallel_until(count(tasks), count(std::min(threads, max_threads_)), [&](std::size_t task) {
    body(static_cast<int>(task));
    return true;
  });
}

}  // namespace fftune
