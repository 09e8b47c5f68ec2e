// What the CPU families share: how many threads, and tasks dealt to lanes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/ffn/ffn.hpp"

namespace fftune::ffn {

/// Why a family of the stages gate_up and down refuses a backward pass.
constexpr const char* forward_alone = "it computes the pass fwd alone";

/// Why a family of gate_up alone refuses whatever has that stage with others or not at all.
constexpr const char* recomputing_alone =
    "it computes gate and up again: the pass bwd with save=input";

/// Why a family of f32 products refuses fp8.
constexpr const char* no_fp8 = "its products are in f32, and fp8 has scales to apply to them";

/// Why a family refuses every form but the plain one.
constexpr const char* plain_alone =
    "it keeps gate and up in the cache, and adds nothing to y: the plain form alone";

constexpr std::int64_t ceil_of(std::int64_t value, std::int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

/// The values below `extent`, and the first that covers it.
inline std::vector<std::int64_t> up_to(std::int64_t extent, std::vector<std::int64_t> values) {
  std::size_t count = 0;
  while (count + 1 < values.size() && values[count] < extent) ++count;
  values.resize(count + 1);
  return values;
}

/// 1, 2, 4, ... and every core. A problem that is not over in an instant gets every core at once.
inline std::vector<std::int64_t> thread_counts(const Shape& shape, const DeviceFacts& facts) {
  constexpr double instant = 1e8;  // flops, about a millisecond of one core
  const std::int64_t cores = facts.multiprocessors;
  const double flops = 6.0 * static_cast<double>(shape.m) * static_cast<double>(shape.d) *
                       static_cast<double>(shape.h);
  std::vector<std::int64_t> counts;
  if (flops < instant)
    for (std::int64_t count = 1; count < cores; count *= 2) counts.push_back(count);
  counts.push_back(cores);
  return counts;
}

/// Calls body(lane, task) once for each task, on `lanes` threads. Tasks of one lane come one after
/// the other, so that they may share a workspace; which lane takes which task is left to time.
template <typename Body>
void deal(Parallel& parallel, int lanes, std::int64_t tasks, const Body& body) {
  std::atomic<std::int64_t> next{0};
  parallel.run(lanes, lanes, [&](int lane) {
    for (std::int64_t task = next++; task < tasks; task = next++)
      body(static_cast<std::size_t>(lane), task);
  });
}

/// The range of `extent` that part `index` of `parts` covers: parts differ by one at most.
struct Range {
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::int64_t size() const { return last - first; }
};
inline Range part_of(std::int64_t extent, std::int64_t parts, std::int64_t index) {
  const std::int64_t least = extent / parts;
  const std::int64_t longer = extent % parts;
  const std::int64_t first = index * least + (index < longer ? index : longer);
  return {first, first + least + (index < longer ? 1 : 0)};
}

}  // namespace fftune::ffn
