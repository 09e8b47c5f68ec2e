#include "cpu/machine.hpp"

#include <unistd.h>

#include <fstream>

#include "cpu/open.hpp"
#include "support/catch.hpp"

using namespace fftune;
namespace fs = std::filesystem;

namespace {

/// A root folder with files of the test's choosing, gone at the end.
class Root {
 public:
  Root() : path_(fs::temp_directory_path() / ("fftune-root-" + std::to_string(getpid()))) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Root() { fs::remove_all(path_); }
  Root(const Root&) = delete;
  Root& operator=(const Root&) = delete;

  Root& file(const fs::path& name, const std::string& text) {
    fs::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << text;
    return *this;
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

}  // namespace

TEST_CASE("a machine that tells nothing has no facts") {
  const Root root;
  REQUIRE(read_caches(root.path()).empty());
  REQUIRE(read_cpu_model(root.path()).empty());
  REQUIRE(read_clock(root.path()) == 0);
  REQUIRE(read_memory(root.path(), "MemTotal") == 0);
  REQUIRE(!read_core_quota(root.path()));
  REQUIRE(!read_memory_room(root.path()));
}

TEST_CASE("processor, clock, memory and caches are read") {
  Root root;
  root.file("proc/cpuinfo",
            "processor\t: 0\nmodel name\t: Some CPU @ 2.00GHz\ncpu MHz\t\t: 2445.5\n")
      .file("proc/meminfo", "MemTotal:       1000 kB\nMemAvailable:    600 kB\n")
      .file("sys/devices/system/cpu/cpu0/cache/index0/level", "3\n")
      .file("sys/devices/system/cpu/cpu0/cache/index0/type", "Unified\n")
      .file("sys/devices/system/cpu/cpu0/cache/index0/size", "32M\n")
      .file("sys/devices/system/cpu/cpu0/cache/index1/level", "1\n")
      .file("sys/devices/system/cpu/cpu0/cache/index1/type", "Data\n")
      .file("sys/devices/system/cpu/cpu0/cache/index1/size", "48K\n");
  REQUIRE(read_cpu_model(root.path()) == "Some CPU @ 2.00GHz");
  REQUIRE(read_clock(root.path()) == 2445.5e6);
  REQUIRE(read_memory(root.path(), "MemTotal") == 1024000);
  REQUIRE(read_memory(root.path(), "MemAvailable") == 614400);
  const auto caches = read_caches(root.path());
  REQUIRE(caches.size() == 2);
  REQUIRE(caches[0].bytes == 48 * 1024);
  REQUIRE(caches[1].level == 3);
  REQUIRE(caches[1].bytes == 32 << 20);

  root.file("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "3500000\n");
  REQUIRE(read_clock(root.path()) == 3.5e9);
}

TEST_CASE("an aarch64 server, which names no model, has its core's name") {
  Root root;
  const auto core = [&](const std::string& implementer, const std::string& part) {
    root.file("proc/cpuinfo", "processor\t: 0\nBogoMIPS\t: 2000.00\nCPU implementer\t: " +
                                  implementer + "\nCPU part\t: " + part + "\n");
    return read_cpu_model(root.path());
  };
  CHECK(core("0x41", "0xd4f") == "Arm Neoverse V2");  // of a GH200
  CHECK(core("0x41", "0xd0c") == "Arm Neoverse N1");
  CHECK(core("0x41", "0xfff") == "aarch64 0x41 0xfff");
  CHECK(core("0xc0", "0xd4f") == "aarch64 0xc0 0xd4f");
  root.file("proc/device-tree/model", std::string("Board 4\0", 8));
  CHECK(core("0x41", "0xd4f") == "Board 4");
}

TEST_CASE("the tightest control group counts, its parents' included") {
  Root root;
  root.file("proc/self/cgroup", "0::/outer/inner\n")
      .file("sys/fs/cgroup/outer/inner/cpu.max", "max 100000\n")
      .file("sys/fs/cgroup/outer/cpu.max", "150000 100000\n")
      .file("sys/fs/cgroup/outer/inner/memory.max", "4096\n")
      .file("sys/fs/cgroup/outer/inner/memory.current", "96\n")
      .file("sys/fs/cgroup/outer/memory.max", "max\n")
      .file("sys/fs/cgroup/outer/memory.current", "96\n");
  REQUIRE(read_core_quota(root.path()) == 1.5);
  REQUIRE(read_memory_room(root.path()) == 4000);
}

TEST_CASE("control groups of version 1 count too") {
  Root root;
  root.file("proc/self/cgroup", "4:memory:/box\n3:cpu,cpuacct:/box\n")
      .file("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "50000\n")
      .file("sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n")
      .file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
      .file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
      .file("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "9223372036854771712\n")
      .file("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "5\n")
      .file("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n")
      .file("sys/fs/cgroup/memory/memory.usage_in_bytes", "2000\n");
  REQUIRE(read_core_quota(root.path()) == 0.5);
  REQUIRE(read_memory_room(root.path()) == 0);
}

TEST_CASE("memory that holds cached files is free for others") {
  Root root;
  // A container that read many files uses 7.9 of 8 GB, and cached files are 7 of those.
  root.file("proc/self/cgroup", "0::/box/job\n")
      .file("sys/fs/cgroup/box/job/memory.max", "max\n")
      .file("sys/fs/cgroup/box/job/memory.current", "7800\n")
      .file("sys/fs/cgroup/box/memory.max", "8000\n")
      .file("sys/fs/cgroup/box/memory.current", "7900\n")
      .file("sys/fs/cgroup/box/memory.stat",
            "anon 800\nfile 7050\nshmem 50\ninactive_file 5000\nactive_file 2000\n");
  CHECK(read_memory_room(root.path()) == 8000 - 7900 + 7000);
  // A tighter group within it.
  root.file("sys/fs/cgroup/box/job/memory.max", "7850\n")
      .file("sys/fs/cgroup/box/job/memory.stat", "inactive_file 100\nactive_file 0\n");
  CHECK(read_memory_room(root.path()) == 7850 - 7800 + 100);
  // The numbers are not of one moment: no group has more than its limit.
  root.file("sys/fs/cgroup/box/job/memory.stat", "inactive_file 9000\nactive_file 0\n");
  CHECK(read_memory_room(root.path()) == 7100);
}

TEST_CASE("cached files of version 1 count with those of the groups within") {
  Root root;
  root.file("proc/self/cgroup", "4:memory:/box\n")
      .file("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "4000\n")
      .file("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "4000\n")
      .file("sys/fs/cgroup/memory/box/memory.stat",
            "inactive_file 1\nactive_file 1\ntotal_inactive_file 2000\ntotal_active_file 500\n");
  CHECK(read_memory_room(root.path()) == 2500);
}

TEST_CASE("this machine's facts make sense") {
  const auto facts = cpu_facts();
  REQUIRE(facts.kind == DeviceKind::cpu);
  REQUIRE(!facts.name.empty());
  REQUIRE(facts.arch == vector_isa());
  REQUIRE(facts.multiprocessors >= 1);
  REQUIRE(facts.memory_bytes > 1 << 26);
  REQUIRE(facts.compute_capability == 0);
  REQUIRE(facts.toolkit.find("OpenBLAS") == 0);
  REQUIRE(available_bytes() > 0);
  REQUIRE(available_bytes() <= facts.memory_bytes);
}
