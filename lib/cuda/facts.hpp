// Facts that the driver reports about a device.
#pragma once

#include <string>

#include "core/dtype.hpp"
#include "cuda/driver.hpp"
#include "device/facts.hpp"

namespace fftune::cuda {

/// `toolkit` is NVRTC's version, or empty. Throws Error(device_fault) if the driver does not
/// answer.
DeviceFacts read_facts(const Driver& driver, int ordinal, const std::string& toolkit);

/// "0000:17:00.0". Throws Error(device_fault).
std::string pci_bus(const Driver& driver, CUdevice device);

/// NVRTC's name of a compute capability: "sm_80" for 80; "sm_90a" for 90, with the instructions of
/// that architecture alone.
std::string architecture_name(int compute_capability);

/// The peak of the matrix units (of the plain fp32 units for f32) in FLOP/s: operations a clock and
/// SM of the architecture, dense, with fp32 accumulation, by SMs and clock. 0 if unknown. From the
/// vendor's architecture whitepapers; products whose rate is halved have less.
double datasheet_flops(const DeviceFacts& facts, DType dtype);

}  // namespace fftune::cuda
