// Effects of fork() on a process: locks and threads of others do not survive in the child, and work
// that is half done is torn there.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

namespace fftune {

/// Forks between this process and the first one that called it, which tells whether something that
/// does not survive fork() was made here: threads, locks, a CUDA context. A few nanoseconds.
int fork_count();

/// Work that a fork() of another thread waits for, because a child could not go on with what it
/// leaves half done: tables that grow, and initialisations that run once. A fork() that waits goes
/// before work that has not begun. May be nested; a fork() within the work does not wait for it.
class UntornByFork {
 public:
  UntornByFork();
  ~UntornByFork();
  UntornByFork(const UntornByFork&) = delete;
  UntornByFork& operator=(const UntornByFork&) = delete;
};

/// Has a child of fork() close the descriptor: else the other end would not learn that this process
/// ended as long as the child lives. `closes_in_children(descriptor, false)` before it is closed.
void closes_in_children(int descriptor, bool does = true);

// A mutex that a forked child finds free, whoever held it in the parent.

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
