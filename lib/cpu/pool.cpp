#include "cpu/pool.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fftune {
namespace {

/// The pool whose task this thread is in, if any: run() of the same pool is then nested.
thread_local const Pool* current_pool = nullptr;

class InsideTask {
 public:
  explicit InsideTask(const Pool* pool) : outer_(current_pool) { current_pool = pool; }
  ~InsideTask() { current_pool = outer_; }
  InsideTask(const InsideTask&) = delete;
  InsideTask& operator=(const InsideTask&) = delete;

 private:
  const Pool* outer_;
};

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Waking a sleeping thread takes tens of microseconds, which a short program would feel between
// its steps; spinning longer would take cores from others.
constexpr std::chrono::microseconds spin_time{50};

/// Spins until `ready`, for spin_time at most; whether it became ready.
template <typename Ready>
bool spin(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + spin_time;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

}  // namespace

Pool::Pool(int threads) {
  for (int worker = 0; worker + 1 < threads; ++worker)
    workers_.emplace_back([this, worker] { serve(worker); });
}

Pool::~Pool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run(int tasks, int threads, const std::function<void(int)>& body) {
  if (tasks <= 0) return;
  const int helpers = std::min({threads, tasks, max_threads()}) - 1;
  if (helpers <= 0 || current_pool == this) {
    const InsideTask inside(this);
    for (int task = 0; task < tasks; ++task) body(task);
    return;
  }
  const std::lock_guard turn(callers_);
  {
    const std::lock_guard lock(mutex_);
    job_.body = &body;
    job_.tasks = tasks;
    job_.helpers = helpers;
    job_.next = 0;
    job_.working = helpers;
    job_.error = nullptr;
    ++generation_;
  }
  wake_.notify_all();
  take_tasks();
  const auto finished = [this] { return job_.working.load(std::memory_order_acquire) == 0; };
  if (!spin(finished)) {
    std::unique_lock lock(mutex_);
    done_.wait(lock, finished);
  }
  const std::lock_guard lock(mutex_);
  if (job_.error) std::rethrow_exception(std::exchange(job_.error, nullptr));
}

void Pool::take_tasks() {
  const InsideTask inside(this);
  try {
    for (int task = job_.next++; task < job_.tasks; task = job_.next++) (*job_.body)(task);
  } catch (...) {
    job_.next = job_.tasks;
    const std::lock_guard lock(mutex_);
    if (!job_.error) job_.error = std::current_exception();
  }
}

std::uint64_t Pool::await_job(std::uint64_t seen) {
  const auto called = [&] { return stop_ || generation_ != seen; };
  if (!spin(called)) {
    std::unique_lock lock(mutex_);
    wake_.wait(lock, called);
  }
  return generation_;
}

void Pool::serve(int worker) {
  std::uint64_t seen = 0;
  while (true) {
    seen = await_job(seen);
    if (stop_) return;
    {
      // A worker that this job does not need may arrive late, when the next is being set up.
      const std::lock_guard lock(mutex_);
      seen = generation_;
      if (worker >= job_.helpers) continue;
    }
    take_tasks();
    const std::lock_guard lock(mutex_);
    if (--job_.working == 0) done_.notify_one();
  }
}

}  // namespace fftune
