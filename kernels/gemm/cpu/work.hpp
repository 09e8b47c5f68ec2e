// How the CPU engines divide their work: ranges of an extent, values of a parameter, and tasks that
// threads take one after the other.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/blas.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/common/cpu_task.hpp"
#include "kernels/gemm/engine.hpp"

namespace fftune::gemm_cpu {

struct Range {
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::int64_t size() const { return last - first; }
};

/// Part `index` of `parts` of [0, extent): parts differ by one at most.
inline Range part_of(std::int64_t extent, std::int64_t parts, std::int64_t index) {
  const std::int64_t least = extent / parts;
  const std::int64_t longer = extent % parts;
  const std::int64_t first = index * least + (index < longer ? index : longer);
  return {first, first + least + (index < longer ? 1 : 0)};
}

/// The values below `extent`, and the first that covers it.
inline std::vector<std::int64_t> up_to(std::int64_t extent, std::vector<std::int64_t> values) {
  std::size_t count = 0;
  while (count + 1 < values.size() && values[count] < extent) ++count;
  values.resize(count + 1);
  return values;
}

constexpr double flops_of_millisecond = 1e8;  // on one core

/// The largest of `counts` threads that leaves each ten microseconds of work, about the time that
/// it takes to wake one.
inline std::int64_t worthwhile_threads(double flops, const std::vector<std::int64_t>& counts) {
  return threads_up_to(static_cast<std::int64_t>(flops / (flops_of_millisecond / 100)), counts);
}

inline double flops_of(const GemmChain& chain) {
  double flops = 0;
  for (const GemmProblem& gemm : chain) flops += gemm.flops();
  return flops;
}

/// 1, 2, 4, ... and every core. A problem that takes longer than about a millisecond of one core
/// gets every core at once.
inline std::vector<std::int64_t> thread_counts(const GemmChain& chain, const DeviceFacts& facts) {
  if (flops_of(chain) >= flops_of_millisecond) return {facts.multiprocessors};
  return fftune::thread_counts(facts);
}

inline std::int64_t default_threads(const GemmChain& chain, const DeviceFacts& facts) {
  return worthwhile_threads(flops_of(chain), thread_counts(chain, facts));
}

/// Calls body(worker, task) once for each task, on at most `workers` threads. A worker runs its
/// tasks one after the other, so they may share a workspace. The assignment of tasks is dynamic.
template <typename Body>
void deal(Parallel& parallel, int workers, std::int64_t tasks, const Body& body) {
  workers = static_cast<int>(std::min<std::int64_t>(workers, tasks));
  std::atomic<std::int64_t> next{0};
  parallel.run(workers, workers, [&](int worker) {
    for (std::int64_t task = next++; task < tasks; task = next++)
      body(static_cast<std::size_t>(worker), task);
  });
}

inline std::size_t bytes_of_floats(std::int64_t count) {
  return static_cast<std::size_t>(count) * sizeof(float);
}

/// Workers that share out tasks, each with memory of its own.
struct Workers {
  int count = 1;
  std::int64_t floats = 0;  // of a worker's memory
  bool call_blas = true;    // each on one thread of OpenBLAS
};

/// A program of one host function. It calls run(call, memory, task) for each of tasks(call) tasks,
/// with the memory of the worker that took it.
template <class Tasks, class Run>
Program worker_program(std::size_t tensors, const Workers& workers, Tasks tasks, Run run) {
  return host_program(tensors, {{bytes_of_floats(workers.count * workers.floats), false}},
                      [=](const HostCall& call) {
                        std::optional<BlasThreads> one;
                        if (workers.call_blas) one.emplace(1);
                        deal(call.parallel, workers.count, tasks(call),
                             [&](std::size_t worker, std::int64_t task) {
                               run(call,
                                   reinterpret_cast<float*>(call.scratch[0]) +
                                       static_cast<std::int64_t>(worker) * workers.floats,
                                   task);
                             });
                      });
}

}  // namespace fftune::gemm_cpu
