// The threads of the program that fftune is part of, as the Parallel that CPU programs run on.
#pragma once

#include <functional>

#include "device/program.hpp"

namespace fftune {

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
