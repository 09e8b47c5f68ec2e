// A persistent pool of threads: the Parallel that CPU programs run on.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "device/program.hpp"

namespace fftune {

/// `threads` counts the caller of run(): a pool of 1 has no thread of its own and runs everything
/// in place. Callers from several threads take turns. run() inside a task runs its tasks in place,
/// one after the other. The first exception of a task is rethrown by run(); tasks that had not
/// begun by then are skipped.
class Pool final : public Parallel {
 public:
  explicit Pool(int threads);
  ~Pool() override;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int max_threads() const override { return static_cast<int>(workers_.size()) + 1; }
  void run(int tasks, int threads, const std::function<void(int)>& body) override;

 private:
  struct Job {
    const std::function<void(int)>* body = nullptr;
    int tasks = 0;
    int helpers = 0;  // workers [0, helpers) take part
    std::atomic<int> next{0};
    std::atomic<int> working{0};  // helpers that have not finished
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

}  // namespace fftune
