#include "device/host_threads.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

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
  std::atomic<int> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      for (int task = next++; task < tasks; task = next++) body(task);
    } catch (...) {
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
      next = tasks;
    }
  };
  const int helpers = std::min({threads, tasks, max_threads_}) - 1;
  {
    std::vector<std::jthread> team;
    for (int i = 0; i < helpers; ++i) team.emplace_back(work);
    work();
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace fftune
