// Other loads on the cores of this process, and limits on them: the counterpart of NVML's reports
// on a GPU.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace fftune {

/// Counters of the cores on which this process may run, at one moment. Counters that cannot be read
/// are 0 at every moment, as on a quiet machine.
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

/// Disturbances between two readings that made measurements slower than the machine can be; one
/// line each. `full_clock_hz` is the clock that it is known to reach under load; 0: not known.
std::vector<std::string> disturbances(const CpuReading& before, const CpuReading& after,
                                      double full_clock_hz);

}  // namespace fftune
