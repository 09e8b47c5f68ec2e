#include "core/parallel_until.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace fftune {

void parallel_until(std::size_t count, std::size_t threads,
                    const std::function<bool(std::size_t)>& task) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> ended{false};
  std::mutex mutex;
  std::exception_ptr first;
  const auto work = [&] {
    try {
      while (!ended) {
        const std::size_t index = next++;
        if (index >= count) return;
        if (!task(index)) ended = true;
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
      ended = true;
    }
  };
  {
    std::vector<std::jthread> team;
    try {
      for (std::size_t i = 1; i < std::min(threads, count); ++i) team.emplace_back(work);
    } catch (const std::system_error&) {
      // A limit of threads: those that were started do it.
    }
    work();
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace fftune
