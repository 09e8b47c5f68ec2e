// A persistent pool of threads: the Parallel that CPU programs run on.
#pragma once

#include <atomic>
#include <functional>

#include "device/program.hpp"

namespace fftune {

/// `threads` counts the caller of run(): a pool of 1 has no thread of its own and runs everything
/// in place. Callers from several threads take turns. run() inside a task runs its tasks in place,
/// one after the other. The first exception of a task is rethrown by run(); tasks that had not
/// begun by then are skipped.
///
/// Threads do not survive fork(): a forked child begins with a team of its own, at its first run().
class Pool final : public Parallel {
 public:
  explicit Pool(int threads);
  ~Pool() override;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int max_threads() const override { return threads_; }
  void run(int tasks, int threads, const std::function<void(int)>& body) override;

 private:
  class Team;

  Team& team();

  int threads_;
  std::atomic<Team*> team_;  // left alone in a forked child: its locks may be held by nobody
  std::atomic<int> forks_;   // fork_count() when it was made
};

// The threads of the program that fftune is part of, as the Parallel that CPU programs run on.

/// As Pool, but its tasks are run by a function of the caller's.
class CallersPool final : public Parallel {
 public:
  using RunTasks = std::function<void(int tasks, const std::function<void(int)>& task)>;

  /// `threads`: at most this many tasks run at once.
  CallersPool(int threads, RunTasks run_tasks);

  int max_threads() const override { return threads_; }
  /// Throws Error(invalid_input) if the caller's function returns before all tasks are done.
  void run(int tasks, int threads, const std::function<void(int)>& body) override;

 private:
  int threads_;
  RunTasks run_tasks_;
};

}  // namespace fftune
