// Plain threads, started for each task and joined at its end.
#pragma once

#include <functional>

#include "device/program.hpp"

namespace fftune {

class HostThreads final : public Parallel {
 public:
  /// As many as this process may use.
  HostThreads();
  int max_threads() const override { return max_threads_; }
  /// As parallel_until(): the first exception of a body is rethrown once every thread has ended.
  void run(int tasks, int threads, const std::function<void(int)>& body) override;

 private:
  int max_threads_;
};

}  // namespace fftune
