// Facts about a device that constraints, geometry, presets and rooflines need.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fftune {

enum class DeviceKind { cpu, cuda };

struct DeviceFacts {
  DeviceKind kind = DeviceKind::cpu;
  std::string name;            // "NVIDIA H200", "AMD EPYC 7763"
  std::string arch;            // compile target "sm_90a"; on a CPU its widest vector ISA, "avx2"
  int compute_capability = 0;  // 90 for 9.0; 0 on a CPU
  int multiprocessors = 0;     // SMs; on a CPU the cores this process may use
  int registers_per_multiprocessor = 0;     // 32-bit registers
  std::int64_t shared_bytes_per_block = 0;  // with the opt-in attribute
  std::int64_t shared_bytes_per_multiprocessor = 0;
  std::int64_t l2_bytes = 0;      // L2; on a CPU the last-level cache
  std::int64_t memory_bytes = 0;  // all of the device's memory
  double memory_bandwidth = 0;    // bytes/s by the datasheet formula; 0 if unknown
  double clock_hz = 0;            // maximum core clock; 0 if unknown
  std::string driver;             // "580.159" or empty
  std::string toolkit;            // NVRTC's version "13.0"; on a CPU the BLAS's
  std::vector<std::pair<std::string, std::string>> details;  // more, for people, in order

  /// The folder name of this device's presets: "nvidia-h200"; a CPU's has the number of cores that
  /// this process may use, because another number is another device to tune:
  /// "amd-epyc-7763-on-8-cores".
  std::string slug() const;
};

/// Lower case, every run of other characters than letters and digits one '-'.
std::string slug_of(std::string_view name);

/// A representative product of an architecture ("sm_80" is an A100 SXM 80 GB), for compiling
/// where no device is. Throws Error(invalid_input) naming the known ones.
DeviceFacts facts_of_architecture(std::string_view arch);

/// The products of an architecture that are known, the representative one first: choices depend on
/// the number of SMs, the caches and the bandwidth. Throws as facts_of_architecture() does.
std::vector<DeviceFacts> products_of_architecture(std::string_view arch);

/// sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120a.
std::vector<std::string> known_architectures();

}  // namespace fftune
