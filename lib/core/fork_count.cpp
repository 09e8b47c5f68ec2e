#include "core/fork_count.hpp"

#include <pthread.h>

#include <atomic>

namespace fftune {
namespace {

// A fork handler is given no context, so this has to be global.
std::atomic<int> forks{0};

}  // namespace

int fork_count() {
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
  return forks.load(std::memory_order_relaxed);
}

}  // namespace fftune
