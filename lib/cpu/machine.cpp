#include "cpu/machine.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <sstream>
#include <string_view>
#include <utility>

#include "core/file_access.hpp"
#include "cpu/blas.hpp"
#include "cpu/open.hpp"

namespace fftune {
namespace {

namespace fs = std::filesystem;

/// The first line of a file, or nothing.
std::optional<std::string> first_line(const fs::path& path) {
  std::istringstream file(text_of_file(path));
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

/// A number with an optional K, M or G behind it; nothing for other words, such as "max".
std::optional<double> number(const std::optional<std::string>& text) {
  if (!text) return std::nullopt;
  std::istringstream in(*text);
  double value = 0;
  if (!(in >> value)) return std::nullopt;
  char unit = 0;
  in >> unit;
  const double scale = unit == 'K'   ? 1024.0
                       : unit == 'M' ? 1048576.0
                       : unit == 'G' ? 1073741824.0
                                     : 1.0;
  return value * scale;
}

/// The value of the first "key : value" line of /proc/cpuinfo with one of these keys.
std::optional<std::string> cpuinfo(const fs::path& root, const std::vector<std::string>& keys) {
  std::istringstream file(text_of_file(root / "proc/cpuinfo"));
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(':');
    if (colon == line.npos) continue;
    const auto key = line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1);
    const auto value = line.find_first_not_of(' ', colon + 1);
    if (value != line.npos && std::find(keys.begin(), keys.end(), key) != keys.end())
      return line.substr(value);
  }
  return std::nullopt;
}

/// The folders of this process's control group and its parents, for one controller of version 1
/// ("cpu"), or for version 2 ("").
std::vector<fs::path> control_groups(const fs::path& root, const std::string& controller) {
  std::vector<fs::path> folders;
  const fs::path mount = root / "sys/fs/cgroup" / controller;
  std::istringstream file(text_of_file(root / "proc/self/cgroup"));
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':');
    const auto second = first == line.npos ? line.npos : line.find(':', first + 1);
    if (second == line.npos) continue;
    std::istringstream names(line.substr(first + 1, second - first - 1));
    bool ours = controller.empty() && line.starts_with("0::");
    for (std::string name; std::getline(names, name, ',');) ours = ours || name == controller;
    if (!ours) continue;
    for (fs::path group = fs::path(line.substr(second + 1)).relative_path(); !group.empty();
         group = group.parent_path())
      folders.push_back(mount / group);
  }
  folders.push_back(mount);
  return folders;
}

/// The core of an aarch64 server, whose cpuinfo has numbers alone (Linux: asm/cputype.h names
/// them).
std::string arm_core(const std::string& implementer, const std::string& part) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 6> neoverse{
      {{"0xd0c", "N1"},
       {"0xd40", "V1"},
       {"0xd49", "N2"},
       {"0xd4f", "V2"},
       {"0xd84", "V3"},
       {"0xd8e", "N3"}}};
  for (const auto& [known, name] : neoverse)
    if (implementer == "0x41" && part == known) return fmt::format("Arm Neoverse {}", name);
  return fmt::format("aarch64 {} {}", implementer, part);
}

/// A field of a control group's file of lines "name value"; nothing if it has none.
std::optional<double> field_of(const fs::path& path, const std::string& field) {
  std::istringstream file(text_of_file(path));
  std::string name;
  double value = 0;
  while (file >> name >> value)
    if (name == field) return value;
  return std::nullopt;
}

/// The bytes of files that a control group's usage counts, and that the kernel gives up first.
double reclaimable_bytes(const fs::path& stat, const std::string& prefix) {
  double bytes = 0;
  for (const char* name : {"inactive_file", "active_file"})
    bytes += field_of(stat, prefix + name).value_or(0);
  return bytes;
}

template <typename Value>
void lower(std::optional<Value>& least, Value value) {
  least = least ? std::min(*least, value) : value;
}

}  // namespace

std::vector<Cache> read_caches(const fs::path& root) {
  std::vector<Cache> caches;
  for (int index = 0; index < 8; ++index) {
    const auto folder =
        root / "sys/devices/system/cpu/cpu0/cache" / ("index" + std::to_string(index));
    const auto level = number(first_line(folder / "level"));
    const auto type = first_line(folder / "type");
    const auto bytes = number(first_line(folder / "size"));
    if (!level || !type || !bytes) continue;
    caches.push_back({static_cast<int>(*level), *type, static_cast<std::int64_t>(*bytes)});
  }
  std::stable_sort(caches.begin(), caches.end(),
                   [](const Cache& a, const Cache& b) { return a.level < b.level; });
  return caches;
}

std::string read_cpu_model(const fs::path& root) {
  if (const auto name = cpuinfo(root, {"model name", "Model", "cpu model"})) return *name;
  if (const auto tree = first_line(root / "proc/device-tree/model"))
    return tree->substr(0, tree->find('\0'));
  const auto implementer = cpuinfo(root, {"CPU implementer"}), part = cpuinfo(root, {"CPU part"});
  return implementer && part ? arm_core(*implementer, *part) : "";
}

double read_clock(const fs::path& root) {
  const auto frequency = root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq";
  if (const auto kilohertz = number(first_line(frequency))) return *kilohertz * 1e3;
  if (const auto megahertz = number(cpuinfo(root, {"cpu MHz"}))) return *megahertz * 1e6;
  return 0;
}

std::int64_t read_memory(const fs::path& root, const std::string& field) {
  std::istringstream file(text_of_file(root / "proc/meminfo"));
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(field + ":"))
      return static_cast<std::int64_t>(number(line.substr(field.size() + 1)).value_or(0)) * 1024;
  return 0;
}

std::optional<double> read_core_quota(const fs::path& root) {
  std::optional<double> cores;
  for (const auto& folder : control_groups(root, "")) {
    std::istringstream text(first_line(folder / "cpu.max").value_or("max"));
    double quota = 0, period = 0;
    if (text >> quota >> period && period > 0) lower(cores, quota / period);
  }
  for (const auto& folder : control_groups(root, "cpu")) {
    const auto quota = number(first_line(folder / "cpu.cfs_quota_us"));
    const auto period = number(first_line(folder / "cpu.cfs_period_us"));
    if (quota && *quota > 0 && period && *period > 0) lower(cores, *quota / *period);
  }
  return cores;
}

double read_throttled_seconds(const fs::path& root) {
  double seconds = 0;
  for (const auto& folder : control_groups(root, ""))
    seconds += 1e-6 * field_of(folder / "cpu.stat", "throttled_usec").value_or(0);
  for (const auto& folder : control_groups(root, "cpu"))
    seconds += 1e-9 * field_of(folder / "cpu.stat", "throttled_time").value_or(0);
  return seconds;
}

std::optional<std::int64_t> read_memory_room(const fs::path& root) {
  std::optional<std::int64_t> room;
  const auto take = [&](const fs::path& folder, const char* limit_file, const char* usage_file,
                        const std::string& prefix) {
    const auto limit = number(first_line(folder / limit_file));
    const auto usage = number(first_line(folder / usage_file));
    // Version 1 writes "no limit" as a number near 2^63.
    if (!limit || !usage || *limit >= 0x1p60) return;
    const double used = std::max(*usage - reclaimable_bytes(folder / "memory.stat", prefix), 0.0);
    lower(room, static_cast<std::int64_t>(std::max(*limit - used, 0.0)));
  };
  // The numbers of a group of version 2 include those of the groups in it; in version 1 their sums
  // have names of their own.
  for (const auto& folder : control_groups(root, ""))
    take(folder, "memory.max", "memory.current", "");
  for (const auto& folder : control_groups(root, "memory"))
    take(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_");
  return room;
}

int usable_cores() {
  int cores = 0;
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) cores = CPU_COUNT(&mask);
  // More cores than a cpu_set_t has bits make the call fail.
  if (cores < 1) cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  if (const auto quota = read_core_quota("/"))
    cores = std::min(cores, static_cast<int>(std::ceil(*quota)));
  return std::max(cores, 1);
}

std::int64_t available_bytes() {
  const auto available = read_memory("/", "MemAvailable");
  return std::min(available, read_memory_room("/").value_or(available));
}

std::string vector_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    return "avx512";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
  return "sse2";
#elif defined(__aarch64__)
  return "neon";
#else
  return "generic";
#endif
}

namespace {

std::string size_text(std::int64_t bytes) {
  return bytes >= 1 << 20 ? fmt::format("{} MiB", bytes >> 20) : fmt::format("{} KiB", bytes >> 10);
}

}  // namespace

DeviceFacts cpu_facts() {
  DeviceFacts facts;
  facts.kind = DeviceKind::cpu;
  facts.arch = vector_isa();
  facts.name = read_cpu_model("/");
  if (facts.name.empty()) facts.name = fmt::format("CPU with {}", facts.arch);
  facts.multiprocessors = usable_cores();
  facts.memory_bytes = read_memory("/", "MemTotal");
  facts.clock_hz = read_clock("/");
  facts.toolkit = blas_version();
  facts.details.emplace_back("BLAS",
                             facts.toolkit.starts_with(no_blas) ? facts.toolkit : blas_file());
  for (const auto& cache : read_caches("/")) {
    facts.details.emplace_back(fmt::format("L{}{} cache", cache.level,
                                           cache.type == "Data"          ? " data"
                                           : cache.type == "Instruction" ? " instruction"
                                                                         : ""),
                               size_text(cache.bytes));
    if (cache.type != "Instruction") facts.l2_bytes = cache.bytes;
  }
  return facts;
}

}  // namespace fftune
