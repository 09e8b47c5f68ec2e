#include "tuning/evaluate/compile_pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace fftune {

unsigned compile_threads() {
  const auto pages = static_cast<double>(sysconf(_SC_PHYS_PAGES));
  const auto memory = pages * static_cast<double>(sysconf(_SC_PAGESIZE));
  const auto by_memory = static_cast<unsigned>(std::clamp(memory / (512 << 20), 1.0, 1024.0));
  return std::max(1u, std::min(std::thread::hardware_concurrency(), by_memory));
}

void run_pool(std::size_t count, unsigned threads, const std::function<bool(std::size_t)>& task) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> ended{false};
  const auto work = [&] {
    while (!ended) {
      const std::size_t index = next++;
      if (index >= count) return;
      if (!task(index)) ended = true;
    }
  };
  const std::size_t helpers = std::min<std::size_t>(threads, count);
  std::vector<std::jthread> pool;
  for (std::size_t i = 1; i < helpers; ++i) pool.emplace_back(work);
  work();
}

}  // namespace fftune
