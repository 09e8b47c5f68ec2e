// Finding and opening devices by name: "cpu", "cuda:0".
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "cpu/open.hpp"
#include "device/backend.hpp"
#include "runtime/environment.hpp"

namespace fftune {

class SourceSet;

struct DeviceListing {
  std::string spec;  // "cuda:0", "cpu"
  DeviceFacts facts;
};

struct Devices {
  std::vector<DeviceListing> found;      // CUDA devices by ordinal, then the CPU
  std::vector<std::string> unavailable;  // "CUDA: libcuda.so.1 is not there: install the driver"
};
Devices list_devices(const Environment& environment);

/// "cuda:0" where there is a CUDA device, else "cpu".
std::string default_device(const Environment& environment);

/// Throws Error(invalid_input) for a word that is not a device, Error(unavailable) for one that is
/// not here, each naming the devices there are. `sources` must outlive the backend. `cpu` is for
/// the CPU; its threads are the environment's where it does not say.
std::unique_ptr<Backend> open_device(const std::string& spec, const SourceSet& sources,
                                     const Environment& environment, const CpuOptions& cpu = {});

/// Bytes that can be allocated on the host without swapping, within the control groups' limits.
std::size_t free_host_bytes();

}  // namespace fftune
