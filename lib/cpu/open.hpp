// The CPU as a device.
#pragma once

#include <functional>
#include <memory>

#include "device/backend.hpp"

namespace fftune {

/// The processor that this process runs on, with the cores it may use.
DeviceFacts cpu_facts();

struct CpuOptions {
  /// Threads at most, whatever a variant was tuned with; 0: one for each core of facts().
  int threads = 0;
  /// Calls task(i) once for each i in [0, tasks), on any threads, and returns when all are done:
  /// the threads of the program that fftune is part of. Empty: a pool of our own.
  std::function<void(int tasks, const std::function<void(int)>& task)> run_tasks = {};
};

/// Programs run on a pool of threads, the caller's among them. Several threads may enqueue at once;
/// their programs take turns.
std::unique_ptr<Backend> open_cpu(const CpuOptions& options = {});

}  // namespace fftune
