#include "cuda/nvml.hpp"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "cuda/shared_library.hpp"

namespace fftune::cuda {
namespace {

// As in nvml.h, whose values never change.
constexpr int nvml_success = 0;
constexpr int insufficient_size = 7;
constexpr int clock_sm = 1;
constexpr std::uint64_t idle = 0x1;
constexpr std::uint64_t power_cap = 0x4;

constexpr std::array<std::pair<std::uint64_t, const char*>, 6> slowdown_names{{
    {0x2, "the clocks that were set for applications"},
    {0x8, "a slowdown by the hardware"},
    {0x10, "other devices of its group"},
    {0x20, "its temperature, by the driver"},
    {0x40, "its temperature, by the hardware"},
    {0x80, "the power brake"},
}};

/// Below this part of the maximum the clock is not what records are made at.
constexpr double full_clock = 0.9;

}  // namespace

struct Nvml::Functions {
  int (*init)() = nullptr;
  int (*handle_by_pci_bus)(const char*, void**) = nullptr;
  int (*compute_processes)(void*, unsigned* count, void* processes) = nullptr;
  int (*clock)(void*, int type, unsigned* mhz) = nullptr;
  int (*max_clock)(void*, int type, unsigned* mhz) = nullptr;
  int (*slowdowns)(void*, unsigned long long* reasons) = nullptr;
};

std::vector<std::string> disturbances(const DeviceReading& reading) {
  std::vector<std::string> all;
  if (reading.processes > 1)
    all.push_back(reading.processes == 2
                      ? "another process uses the device"
                      : fmt::format("{} other processes use the device", reading.processes - 1));
  for (const auto& [bit, name] : slowdown_names)
    if (reading.slowdowns & bit) all.push_back(fmt::format("its clocks are held back by {}", name));
  const bool explained = !all.empty() || (reading.slowdowns & (idle | power_cap)) != 0;
  if (!explained && reading.clock_mhz < full_clock * reading.max_clock_mhz)
    all.push_back(
        fmt::format("its clock is at {} of {} MHz", reading.clock_mhz, reading.max_clock_mhz));
  return all;
}

std::optional<Nvml> Nvml::open(const std::string& pci_bus, const std::string& library) {
  const auto opened = SharedLibrary::open(library);
  if (!opened) return {};
  const auto find = [&](auto& function, std::initializer_list<const char*> names) {
    for (const char* name : names)
      if (!function)
        function = reinterpret_cast<std::decay_t<decltype(function)>>(opened->find(name));
  };
  Functions all;
  find(all.init, {"nvmlInit_v2"});
  find(all.handle_by_pci_bus, {"nvmlDeviceGetHandleByPciBusId_v2"});
  find(all.compute_processes,
       {"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"});
  find(all.clock, {"nvmlDeviceGetClockInfo"});
  find(all.max_clock, {"nvmlDeviceGetMaxClockInfo"});
  find(all.slowdowns,
       {"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"});
  void* device = nullptr;
  if (!all.init || all.init() != nvml_success || !all.handle_by_pci_bus ||
      all.handle_by_pci_bus(pci_bus.c_str(), &device) != nvml_success)
    return {};
  return Nvml(std::make_shared<const Functions>(all), device);
}

DeviceReading Nvml::read() const {
  DeviceReading reading;
  // With no room for ids the call returns the count. The ids are of no use: in a container they are
  // those of the host.
  unsigned count = 0;
  if (functions_->compute_processes) {
    const int code = functions_->compute_processes(device_, &count, nullptr);
    if (code == nvml_success || code == insufficient_size)
      reading.processes = static_cast<int>(count);
  }
  unsigned mhz = 0;
  unsigned max_mhz = 0;
  if (functions_->clock && functions_->max_clock &&
      functions_->clock(device_, clock_sm, &mhz) == nvml_success &&
      functions_->max_clock(device_, clock_sm, &max_mhz) == nvml_success) {
    reading.clock_mhz = mhz;
    reading.max_clock_mhz = max_mhz;
  }
  unsigned long long reasons = 0;
  if (functions_->slowdowns && functions_->slowdowns(device_, &reasons) == nvml_success)
    reading.slowdowns = reasons;
  return reading;
}

}  // namespace fftune::cuda
