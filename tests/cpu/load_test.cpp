// Other loads on the cores: from files that the test writes, and from a process that really spins.
#include "cpu/load.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "cpu/machine.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;
using fftune::testing::TemporaryFolder;
namespace fs = std::filesystem;

namespace {

void write(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

/// Readings of a machine of four cores, a second apart, in which only what a test sets happened.
struct Second {
  CpuReading before{.seconds = 10, .cores = 4};
  CpuReading after{.seconds = 11, .cores = 4, .busy_seconds = 4, .own_seconds = 4};
  double full_clock_hz = 0;

  std::vector<std::string> found() const { return disturbances(before, after, full_clock_hz); }
};

bool is_close(double value, double expected) {
  return std::abs(value - expected) <= 1e-9 * expected;
}

std::string only(const std::vector<std::string>& lines) {
  REQUIRE(lines.size() == 1);
  return lines.front();
}

}  // namespace

TEST_CASE("counters of the cores that count are read, and no others") {
  const TemporaryFolder folder;
  const auto& root = folder.path();
  const double tick = 1.0 / static_cast<double>(sysconf(_SC_CLK_TCK));
  write(root / "proc/stat",
        "cpu  9999 9999 9999 9999 9999 9999 9999 9999 0 0\n"
        "cpu0 1 2 4 1000 1000 8 16 32 0 0\n"
        "cpu1 500 500 500 500 500 500 500 500 0 0\n"
        "cpu2 100 0 0 7 7 0 0 3 0 0\n"
        "intr 12345 0 0\n");
  write(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", "2000000\n");
  write(root / "sys/devices/system/cpu/cpu2/cpufreq/scaling_cur_freq", "3000000\n");
  write(root / "sys/devices/system/cpu/cpu2/thermal_throttle/core_throttle_count", "5\n");
  write(root / "proc/self/cgroup", "0::/box\n");
  write(root / "sys/fs/cgroup/box/cpu.stat",
        "usage_usec 77\nnr_throttled 3\nthrottled_usec 250000\n");
  const auto reading = read_cpu(root, {0, 2});
  CHECK(reading.cores == 2);
  CHECK(is_close(reading.busy_seconds, tick * (1 + 2 + 4 + 8 + 16 + 100)));
  CHECK(is_close(reading.stolen_seconds, tick * 35));
  CHECK(is_close(reading.stopped_seconds, 0.25));
  CHECK(is_close(reading.clock_hz, 2.5e9));
  CHECK(reading.overheated == 5);
}

TEST_CASE("a machine that tells nothing is quiet") {
  const TemporaryFolder folder;
  const auto before = read_cpu(folder.path(), {0, 1});
  // This process works meanwhile, but such a machine's counters do not show it.
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  while (std::chrono::steady_clock::now() < end) continue;
  CHECK(disturbances(before, read_cpu(folder.path(), {0, 1}), 3e9).empty());
  CHECK(disturbances(before, before, 3e9).empty());
}

TEST_CASE("disturbances are named with their amount") {
  CHECK(Second{}.found().empty());
  Second others;
  others.after.own_seconds = 2.8;
  CHECK(only(others.found()) == "other processes use 1.2 of its 4 cores");
  Second stolen;
  stolen.after.stolen_seconds = 0.5;
  CHECK(only(stolen.found()) == "the hypervisor takes 0.5 of its 4 cores");
  Second stopped;
  stopped.after.stopped_seconds = 0.1;
  CHECK(only(stopped.found()).find("the quota of its control group") == 0);
  Second hot;
  hot.after.overheated = 1;
  CHECK(only(hot.found()).find("temperature") != std::string::npos);
  Second slow;
  slow.full_clock_hz = 3e9;
  slow.after.clock_hz = 2.4e9;
  CHECK(only(slow.found()) == "its clock is at 2400 of 3000 MHz");
}

TEST_CASE("background work of a quiet system and an idle core's clock are no disturbance") {
  Second quiet;
  quiet.after.own_seconds = 3.9;
  quiet.after.stolen_seconds = 0.05;
  CHECK(quiet.found().empty());
  Second idle;
  idle.after.busy_seconds = idle.after.own_seconds = 0.1;
  idle.full_clock_hz = 3e9;
  idle.after.clock_hz = 0.8e9;
  CHECK(idle.found().empty());
  // A few ticks are too few for a conclusion.
  Second brief;
  brief.after.seconds = 10.05;
  brief.after.busy_seconds = 0.22;
  brief.after.own_seconds = 0.18;
  CHECK(brief.found().empty());
}

TEST_CASE("another process that spins is seen") {
  const auto cores = own_cores();
  const auto first = read_cpu("/", cores);
  if (first.busy_seconds == 0) FFTUNE_SKIP("/proc/stat tells nothing here");
  const pid_t spinning = fork();
  if (spinning == 0) {
    alarm(20);
    while (true) asm volatile("");
  }
  REQUIRE(spinning > 0);
  const auto before = read_cpu("/", cores);
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  const auto found = disturbances(before, read_cpu("/", cores), 0);
  kill(spinning, SIGKILL);
  waitpid(spinning, nullptr, 0);
  REQUIRE(!found.empty());
  CHECK(found.front().find("other processes use") == 0);
}
