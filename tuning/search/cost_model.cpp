#include "tuning/search/enumerate.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <variant>

namespace fftune {
namespace {

constexpr double launch_us = 2;
/// Ramp-up and tail of a wave of blocks, beside its work.
constexpr double wave_us = 0.4;
/// Resident threads of an SM (of at most 2048) whose loads in flight about saturate the memory
/// bandwidth.
constexpr double busy_threads = 1024;
constexpr double most_threads = 2048;
constexpr double most_blocks = 32;
/// Shared memory that the driver reserves in each block.
constexpr double kept_shared_bytes = 1024;

double count_of(const Dim3& dim) {
  return double(dim.x) * dim.y * dim.z;
}

struct Shape {
  double busy = 1;  // the part of the device's time in which it has enough to do
  double waves = 0;
};

Shape shape_of(const KernelLaunch& launch, const DeviceFacts& facts) {
  const double blocks = std::max(count_of(launch.grid), 1.0);
  const double threads = std::max(count_of(launch.block), 1.0);
  const double processors = std::max(facts.multiprocessors, 1);
  const double by_shared = static_cast<double>(facts.shared_bytes_per_multiprocessor) /
                           (launch.shared_bytes + kept_shared_bytes);
  const double resident = std::max(
      std::floor(std::min({most_blocks, most_threads / threads, std::max(by_shared, 1.0)})), 1.0);
  const double at_once = processors * resident;
  Shape shape;
  shape.waves = std::ceil(blocks / at_once);
  const double full = blocks / (shape.waves * at_once);
  const double waiting = std::min(blocks, at_once) * threads / (processors * busy_threads);
  shape.busy = std::min(1.0, waiting) * (shape.waves > 1 ? full : 1.0);
  return shape;
}

}  // namespace

double cost_model_us(const Family& family, const Problem& problem, const DeviceFacts& facts,
                     const Config& config, double floor_us) {
  if (const auto own = family.estimate(problem, facts, config)) return *own * 1e6;
  const double floor = std::max(floor_us, 1e-3);
  if (facts.kind != DeviceKind::cuda) return floor;
  double overhead = 0;
  double busy = 1;
  const Program program = family.program(problem, facts, config);
  for (const auto& step : program.steps) {
    const auto* launch = std::get_if<KernelLaunch>(&step);
    if (!launch) continue;
    const Shape shape = shape_of(*launch, facts);
    overhead += launch_us + wave_us * shape.waves;
    busy = std::min(busy, shape.busy);
  }
  return overhead + floor / std::max(busy, 1e-3);
}

std::vector<double> launch_traits(const Family& family, const Problem& problem,
                                  const DeviceFacts& facts, const Config& config) {
  if (facts.kind != DeviceKind::cuda) return {0, 0, 0};
  const Program program = family.program(problem, facts, config);
  for (const auto& step : program.steps) {
    const auto* launch = std::get_if<KernelLaunch>(&step);
    if (!launch) continue;
    const double threads = std::max(count_of(launch->block), 1.0);
    return {std::log2(threads * std::max(count_of(launch->grid), 1.0)), std::log2(threads),
            std::log2(1.0 + launch->shared_bytes)};
  }
  return {0, 0, 0};
}

}  // namespace fftune
