#include "core/fork.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
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
// Never destroyed: threads may outlive main().
alignas(Gate) unsigned char gate_memory[sizeof(Gate)];
Gate& gate() {
  static Gate* const made = new (gate_memory) Gate;
  return *made;
}

/// Descriptors that children close, in memory that is never given back.
struct Closed {
  std::mutex mutex;
  std::vector<int> descriptors;
};
alignas(Closed) unsigned char closed_memory[sizeof(Closed)];
Closed& closed() {
  static Closed* const made = new (closed_memory) Closed;
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
  for (const int descriptor : closed().descriptors) ::close(descriptor);
  closed().descriptors.clear();
  // The threads that waited here, or for which this one did, are not in the child.
  new (&gate()) Gate;
  gate().working = depth > 0 ? 1 : 0;
}

void register_handlers() {
  static const int registered =
      (gate(), closed(), ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child));
  static_cast<void>(registered);
}

}  // namespace

int fork_count() {
  register_handlers();
  return forks.load(std::memory_order_relaxed);
}

void closes_in_children(int descriptor, bool does) {
  const UntornByFork untorn;
  const std::lock_guard lock(closed().mutex);
  auto& all = closed().descriptors;
  if (does)
    all.push_back(descriptor);
  else
    all.erase(std::remove(all.begin(), all.end(), descriptor), all.end());
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

}  // namespace fftune
