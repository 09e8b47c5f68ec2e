#include "core/fork.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <vector>

namespace fftune {
namespace {

// Fork handlers are given no context, so these have to be global.
std::atomic<int> forks{0};
thread_local int depth = 0;  // of this thread's works within each other

struct Gate {
  std::mutex mutex;  // held by a thread that forks, until it has
  std::condition_variable changed;
  int working = 0;  // threads
  int waiting = 0;  // that fork
};
struct Descriptors {
  std::mutex mutex;  // within UntornByFork
  std::vector<int> open;
};
Descriptors& descriptors() {
  static Descriptors* const made = new Descriptors;
  return *made;
}
// Never destroyed: threads may outlive main().
alignas(Gate) unsigned char gate_memory[sizeof(Gate)];
Gate& gate() {
  static Gate* const made = new (gate_memory) Gate;
  return *made;
}

void before_fork() {
  if (depth > 0) return;
  std::unique_lock lock(gate().mutex);
  ++gate().waiting;
  gate().changed.wait(lock, [] { return gate().working == 0; });
  lock.release();
}

void after_fork_in_parent() {
  if (depth > 0) return;
  --gate().waiting;
  gate().mutex.unlock();
  gate().changed.notify_all();
}

void after_fork_in_child() {
  forks.fetch_add(1, std::memory_order_relaxed);
  // The threads that waited here, or for which this one did, are not in the child.
  new (&gate()) Gate;
  gate().working = depth > 0 ? 1 : 0;
  for (const int descriptor : descriptors().open) ::close(descriptor);
  descriptors().open.clear();
}

void register_handlers() {
  static const int registered =
      (gate(), descriptors(),
       ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child));
  static_cast<void>(registered);
}

}  // namespace

int fork_count() {
  register_handlers();
  return forks.load(std::memory_order_relaxed);
}

UntornByFork::UntornByFork() {
  register_handlers();
  if (depth++ > 0) return;
  std::unique_lock lock(gate().mutex);
  gate().changed.wait(lock, [] { return gate().waiting == 0; });
  ++gate().working;
}

UntornByFork::~UntornByFork() {
  if (--depth > 0) return;
  {
    const std::lock_guard lock(gate().mutex);
    --gate().working;
  }
  gate().changed.notify_all();
}

void close_in_children(int descriptor) {
  const UntornByFork untorn;
  const std::lock_guard lock(descriptors().mutex);
  descriptors().open.push_back(descriptor);
}

void forget_in_children(int descriptor) {
  const UntornByFork untorn;
  const std::lock_guard lock(descriptors().mutex);
  std::erase(descriptors().open, descriptor);
}

}  // namespace fftune
