#include "cpu/callers_pool.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <utility>

#include "core/error.hpp"

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
