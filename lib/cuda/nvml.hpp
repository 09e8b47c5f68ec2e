// NVML, the driver's management library, opened at run time: who else uses a device, and what holds
// its clocks back. Needs no header of the toolkit.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fftune::cuda {

/// NVML's readings of a device at this moment.
struct DeviceReading {
  int processes = 0;  // with a context on it, this one included; 0 where that is not told
  unsigned clock_mhz = 0;
  unsigned max_clock_mhz = 0;
  std::uint64_t slowdowns = 0;  // nvmlClocksThrottleReasons
};

/// Disturbances in a reading, taken just after work of this process, that make measurements slower
/// than the device can be; one line each. The power cap is no disturbance: a kernel that draws more
/// than the cap allows is as fast as it will ever be on that device.
std::vector<std::string> disturbances(const DeviceReading& reading);

/// One device, by its PCI bus.
class Nvml {
 public:
  /// Nothing where there is no such library, or it does not know the device.
  static std::optional<Nvml> open(const std::string& pci_bus,
                                  const std::string& library = "libnvidia-ml.so.1");

  /// Values that cannot be read are those of a quiet device.
  DeviceReading read() const;

 private:
  struct Functions;
  Nvml(std::shared_ptr<const Functions> functions, void* device)
      : functions_(std::move(functions)), device_(device) {}

  std::shared_ptr<const Functions> functions_;
  void* device_;
};

}  // namespace fftune::cuda
