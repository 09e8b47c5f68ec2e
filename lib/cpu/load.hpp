// What else uses the cores of this process, or holds them back: what NVML tells of a GPU.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace fftune {

/// Counters of the cores on which this process may run, at one moment. What cannot be read is as on
/// a quiet machine: 0 at every moment.
struct CpuReading {
  double seconds = 0;           // of a clock that does not jump
  int cores = 0;                // on which this process may run
  double busy_seconds = 0;      // of these cores, by anyone
  double own_seconds = 0;       // of these, by this process
  double stolen_seconds = 0;    // in which the hypervisor ran something else there
  double stopped_seconds = 0;   // in which the control group's quota held this process back
  std::int64_t overheated = 0;  // how often a core was slowed down by its temperature
  double clock_hz = 0;          // the mean of the cores
};

/// Reads /proc/stat, the control group's cpu.stat, thermal_throttle and cpufreq below `root`, for
/// these cores; the first two numbers and own_seconds are of this process.
CpuReading read_cpu(const std::filesystem::path& root, const std::vector<int>& cores);

/// The cores in this process's affinity mask.
std::vector<int> own_cores();

/// Whether this process used most of its cores in between: the clock is then that of a load.
bool is_working(const CpuReading& before, const CpuReading& after);

/// What between two readings made measurements worse than what the machine can do; one line each.
/// `full_clock_hz` is the clock that it is known to reach under load; 0: not known.
std::vector<std::string> disturbances(const CpuReading& before, const CpuReading& after,
                                      double full_clock_hz);

}  // namespace fftune
