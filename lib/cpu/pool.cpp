#include "cpu/pool.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/fork.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fftune {
namespace {

/// The team whose task this thread is in, if any: run() of the same pool is then nested.
thread_local const void* current_team = nullptr;

class InsideTask {
 public:
  explicit InsideTask(const void* team) : outer_(current_team) { current_team = team; }
  ~InsideTask() { current_team = outer_; }
  InsideTask(const InsideTask&) = delete;
  InsideTask& operator=(const InsideTask&) = delete;

 private:
  const void* outer_;
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

/// The threads, and the job that they are at.
class Pool::Team {
 public:
  /// Team() completes the object first: if a thread cannot be started, the destructor ends those
  /// that were.
  explicit Team(int threads) : Team() {
    for (int worker = 0; worker + 1 < threads; ++worker)
      workers_.emplace_back([this, worker] { serve(worker); });
  }
  ~Team() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  void run(int tasks, int threads, const std::function<void(int)>& body);

 private:
  Team() = default;

  struct Job {
    const std::function<void(int)>* body = nullptr;
    int tasks = 0;
    int helpers = 0;    // workers [0, helpers) may take part, while it is open
    bool open = false;  // guarded by mutex_: whether workers may still begin
    std::atomic<int> next{0};
    std::atomic<int> working{0};  // helpers that have begun and not finished
    std::exception_ptr error;     // guarded by mutex_
  };

  void serve(int worker);
  std::uint64_t await_job(std::uint64_t seen);
  void take_tasks();

  std::vector<std::thread> workers_;
  std::mutex callers_;  // held by the run() in progress
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::atomic<std::uint64_t> generation_{0};  // one more for every job
  std::atomic<bool> stop_{false};
  Job job_;
};

Pool::Pool(int threads)
    : threads_(std::max(threads, 1)), team_(new Team(threads_)), forks_(fork_count()) {}

Pool::~Pool() {
  if (forks_ == fork_count()) delete team_.load();
}

Pool::Team& Pool::team() {
  if (forks_.load(std::memory_order_acquire) != fork_count()) {
    // Threads of the child that come here at once make one team.
    static std::mutex making;
    const std::lock_guard lock(making);
    if (forks_ != fork_count()) {
      team_ = new Team(threads_);
      forks_ = fork_count();
    }
  }
  return *team_;
}

void Pool::run(int tasks, int threads, const std::function<void(int)>& body) {
  if (tasks > 0) team().run(tasks, std::min(threads, threads_), body);
}

void Pool::Team::run(int tasks, int threads, const std::function<void(int)>& body) {
  const int helpers = std::min(threads, tasks) - 1;
  if (helpers <= 0 || current_team == this) {
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
    job_.open = true;
    job_.next = 0;
    job_.error = nullptr;
    ++generation_;
  }
  wake_.notify_all();
  take_tasks();
  {
    // All tasks are taken. A worker that has not begun is not waited for: on a busy machine it may
    // not run for milliseconds.
    const std::lock_guard lock(mutex_);
    job_.open = false;
  }
  const auto finished = [this] { return job_.working.load(std::memory_order_acquire) == 0; };
  if (!spin(finished)) {
    std::unique_lock lock(mutex_);
    done_.wait(lock, finished);
  }
  const std::lock_guard lock(mutex_);
  if (job_.error) std::rethrow_exception(std::exchange(job_.error, nullptr));
}

void Pool::Team::take_tasks() {
  const InsideTask inside(this);
  try {
    for (int task = job_.next++; task < job_.tasks; task = job_.next++) (*job_.body)(task);
  } catch (...) {
    job_.next = job_.tasks;
    const std::lock_guard lock(mutex_);
    if (!job_.error) job_.error = std::current_exception();
  }
}

std::uint64_t Pool::Team::await_job(std::uint64_t seen) {
  const auto called = [&] { return stop_ || generation_ != seen; };
  if (!spin(called)) {
    std::unique_lock lock(mutex_);
    wake_.wait(lock, called);
  }
  return generation_;
}

void Pool::Team::serve(int worker) {
  std::uint64_t seen = 0;
  while (true) {
    seen = await_job(seen);
    if (stop_) return;
    {
      // A worker may arrive late, when the job is done or the next is being set up.
      const std::lock_guard lock(mutex_);
      seen = generation_;
      if (worker >= job_.helpers || !job_.open) continue;
      ++job_.working;
    }
    take_tasks();
    const std::lock_guard lock(mutex_);
    if (--job_.working == 0) done_.notify_one();
  }
}

}  // namespace fftune

namespace fftune {
namespace {

/// Whether this thread is in a task of such a pool: run() in it is nested.
thread_local bool inside_task = false;

}  // namespace

CallersPool::CallersPool(int threads, RunTasks run_tasks)
    : threads_(std::max(threads, 1)), run_tasks_(std::move(run_tasks)) {}

void CallersPool::run(int tasks, int threads, const std::function<void(int)>& body) {
  const int runners = std::min({threads, threads_, tasks});
  if (runners <= 1 || inside_task) {
    for (int task = 0; task < tasks; ++task) body(task);
    return;
  }
  // Each runner takes tasks in order until none is left, so that a function that runs them one
  // after the other, or on fewer threads, is as right as any.
  std::atomic<int> next{0};
  std::atomic<int> done{0};
  std::mutex mutex;
  std::exception_ptr error;
  run_tasks_(runners, [&](int) {
    const bool outer = std::exchange(inside_task, true);
    try {
      for (int task = next++; task < tasks; task = next++) {
        body(task);
        ++done;
      }
    } catch (...) {
      next = tasks;
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
    inside_task = outer;
  });
  if (error) std::rethrow_exception(error);
  if (done < tasks)
    throw Error(ErrorKind::invalid_input,
                "the context's parallel_for returned before all tasks were done: it has to call "
                "task(state, i) for every i and wait for them");
}

}  // namespace fftune
