// The machine as Linux describes it, and this process's share of it. Each reader takes the folder
// to use as "/", so that tests can provide a machine of their own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace fftune {

struct Cache {
  int level = 0;
  std::string type;  // "Data", "Instruction", "Unified"
  std::int64_t bytes = 0;
};

/// The caches of the first core, from the smallest level on; empty where sysfs does not tell.
std::vector<Cache> read_caches(const std::filesystem::path& root);

/// The processor's name: "AMD EPYC 7763 64-Core Processor", "Arm Neoverse V2"; empty if unknown.
std::string read_cpu_model(const std::filesystem::path& root);

/// The maximum clock in Hz, or the clock now where only that is known; 0 if unknown.
double read_clock(const std::filesystem::path& root);

/// A line of /proc/meminfo ("MemTotal") in bytes; 0 if unknown.
std::int64_t read_memory(const std::filesystem::path& root, const std::string& field);

/// The tightest quota of this process's control groups, in cores; nothing if there is none.
std::optional<double> read_core_quota(const std::filesystem::path& root);

/// How long that quota has held this process's control groups back so far, in seconds; 0 where
/// there is none.
double read_throttled_seconds(const std::filesystem::path& root);

/// The bytes that this process's control groups leave it, those of cached files included, which the
/// kernel gives up for others; nothing if they set no limit.
std::optional<std::int64_t> read_memory_room(const std::filesystem::path& root);

/// Cores in this process's affinity mask, at most the quota rounded up; at least 1.
int usable_cores();

/// Bytes that can be allocated without swapping, within the control groups' limits.
std::int64_t available_bytes();

/// The widest vector instruction set that this processor and system support: "avx512", "avx2",
/// "sse2", "neon", or the compiler's target where none is known.
std::string vector_isa();

}  // namespace fftune
