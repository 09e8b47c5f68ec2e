// A mutex that a forked child finds free, whoever held it in the parent.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "core/fork_count.hpp"

namespace fftune {

class ForkMutex {
 public:
  /// The mutex of this process. To be locked by a guard, which then unlocks the one that it locked.
  std::mutex& own() {
    Own* now = own_.load(std::memory_order_acquire);
    if (now->forks == fork_count()) return now->mutex;
    // The thread that held the parent's is not here: nobody unlocks that one, or may destroy it.
    auto fresh = std::make_unique<Own>();
    if (!own_.compare_exchange_strong(now, fresh.get(), std::memory_order_acq_rel))
      return own_.load(std::memory_order_acquire)->mutex;
    return fresh.release()->mutex;
  }

  ForkMutex() = default;
  ~ForkMutex() {
    Own* const now = own_.load();
    if (now->forks == fork_count()) delete now;
  }
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;

 private:
  struct Own {
    std::mutex mutex;
    int forks = fork_count();  // when it was made
  };
  std::atomic<Own*> own_{new Own};
};

}  // namespace fftune
