// A thread that runs one task after the other. Workers die with the thread that started
// them (tuning/worker/process.cpp), so whatever starts them must live as long as they are needed.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

namespace fftune {

class WorkerThread {
 public:
  WorkerThread() : thread_([this] { serve(); }) {}
  /// Ends after the work that was given to it.
  ~WorkerThread() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_one();
  }
  WorkerThread(const WorkerThread&) = delete;
  WorkerThread& operator=(const WorkerThread&) = delete;

  /// An exception of the work is rethrown by the future.
  std::future<void> start(std::function<void()> work) {
    std::packaged_task<void()> task(std::move(work));
    auto future = task.get_future();
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
    return future;
  }

 private:
  void serve() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return ended_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::packaged_task<void()>> tasks_;
  bool ended_ = false;
  std::jthread thread_;  // last: it uses the others
};

}  // namespace fftune
