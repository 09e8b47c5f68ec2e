#include "cpu/load.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <sstream>

#include "core/file_access.hpp"
#include "cpu/machine.hpp"

namespace fftune {
namespace {

namespace fs = std::filesystem;

/// Others may take this much of the cores: what a quiet system does for itself.
constexpr double quiet_cores = 0.08;
constexpr double quiet_share = 0.01;
/// The counters of /proc/stat advance in ticks of 10 ms, and a few of these are charged to the
/// wrong process.
constexpr double counting_error_seconds = 0.05;

/// Below this part of the clock that was reached before, times are not what they were.
constexpr double full_clock = 0.9;

/// An idle core lowers its clock by itself: only that of working ones tells.
constexpr double working_share = 0.5;

double number_in(const fs::path& path) {
  std::istringstream file(text_of_file(path));
  double value = 0;
  return file >> value ? value : 0;
}

/// The lines "cpuN user nice system idle iowait irq softirq steal ..." of these cores. Time of
/// guests is part of user's.
void add_counters(const fs::path& root, const std::set<int>& cores, CpuReading& reading) {
  const double tick = 1.0 / static_cast<double>(std::max(1L, sysconf(_SC_CLK_TCK)));
  std::istringstream file(text_of_file(root / "proc/stat"));
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("cpu") || line.size() < 4 || line[3] < '0' || line[3] > '9') continue;
    std::istringstream in(line.substr(3));
    int core = 0;
    double user = 0, nice = 0, system = 0, idle = 0, waiting = 0, irq = 0, soft_irq = 0, steal = 0;
    in >> core >> user >> nice >> system >> idle >> waiting >> irq >> soft_irq >> steal;
    if (!cores.contains(core)) continue;
    reading.busy_seconds += tick * (user + nice + system + irq + soft_irq);
    reading.stolen_seconds += tick * steal;
  }
}

double own_seconds() {
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) return 0;
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

std::string of_cores(double amount, int cores) {
  return fmt::format("{:.2g} of its {} cores", amount, cores);
}

}  // namespace

std::vector<int> own_cores() {
  std::vector<int> cores;
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0)
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &mask)) cores.push_back(core);
  // More cores than a cpu_set_t has bits make the call fail.
  if (cores.empty())
    for (int core = 0; core < static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)); ++core)
      cores.push_back(core);
  return cores;
}

CpuReading read_cpu(const fs::path& root, const std::vector<int>& cores) {
  CpuReading reading;
  const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
  reading.seconds = now.count();
  reading.cores = static_cast<int>(cores.size());
  reading.own_seconds = own_seconds();
  add_counters(root, {cores.begin(), cores.end()}, reading);
  reading.stopped_seconds = read_throttled_seconds(root);
  double clocks = 0;
  int with_clock = 0;
  for (const int core : cores) {
    const fs::path folder = root / fmt::format("sys/devices/system/cpu/cpu{}", core);
    reading.overheated +=
        static_cast<std::int64_t>(number_in(folder / "thermal_throttle/core_throttle_count"));
    const double kilohertz = number_in(folder / "cpufreq/scaling_cur_freq");
    clocks += kilohertz * 1e3;
    with_clock += kilohertz > 0;
  }
  if (with_clock > 0) reading.clock_hz = clocks / with_clock;
  return reading;
}

bool is_working(const CpuReading& before, const CpuReading& after) {
  const double there = (after.seconds - before.seconds) * after.cores;
  return there > 0 && after.own_seconds - before.own_seconds > working_share * there;
}

std::vector<std::string> disturbances(const CpuReading& before, const CpuReading& after,
                                      double full_clock_hz) {
  std::vector<std::string> all;
  const double seconds = after.seconds - before.seconds;
  if (!(seconds > 0) || after.cores == 0) return all;
  const auto amount = [&](double now, double then) { return (now - then) / seconds; };
  const double limit = quiet_cores + quiet_share * after.cores + counting_error_seconds / seconds;
  const double others = amount(after.busy_seconds, before.busy_seconds) -
                        amount(after.own_seconds, before.own_seconds);
  if (others > limit) all.push_back("other processes use " + of_cores(others, after.cores));
  const double stolen = amount(after.stolen_seconds, before.stolen_seconds);
  if (stolen > limit) all.push_back("the hypervisor takes " + of_cores(stolen, after.cores));
  if (after.stopped_seconds > before.stopped_seconds)
    all.push_back("the quota of its control group stops it: give whole cores (a cpuset) instead");
  if (after.overheated > before.overheated)
    all.push_back("its clocks are held back by its temperature");
  if (is_working(before, after) && after.clock_hz > 0 &&
      after.clock_hz < full_clock * full_clock_hz)
    all.push_back(fmt::format("its clock is at {:.0f} of {:.0f} MHz", after.clock_hz / 1e6,
                              full_clock_hz / 1e6));
  return all;
}

}  // namespace fftune
