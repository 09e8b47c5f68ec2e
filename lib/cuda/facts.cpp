#include "cuda/facts.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdint>

namespace fftune::cuda {
namespace {

class Device {
 public:
  Device(const Driver& driver, int ordinal) : driver_(driver) {
    driver.check(driver.device_get(&device_, ordinal), "cuDeviceGet");
  }

  std::int64_t attribute(CUdevice_attribute attribute) const {
    int value = 0;
    driver_.check(driver_.device_get_attribute(&value, attribute, device_), "cuDeviceGetAttribute");
    return value;
  }

  std::string name() const {
    std::array<char, 256> text{};
    driver_.check(driver_.device_get_name(text.data(), static_cast<int>(text.size()), device_),
                  "cuDeviceGetName");
    return text.data();
  }

  std::int64_t memory_bytes() const {
    std::size_t bytes = 0;
    driver_.check(driver_.device_total_mem(&bytes, device_), "cuDeviceTotalMem");
    return static_cast<std::int64_t>(bytes);
  }

  CUdevice handle() const { return device_; }

 private:
  const Driver& driver_;
  CUdevice device_ = 0;
};

std::string version_text(int version) {  // 13000 is 13.0
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

}  // namespace

std::string pci_bus(const Driver& driver, CUdevice device) {
  std::array<char, 32> text{};
  driver.check(driver.device_get_pci_bus_id(text.data(), static_cast<int>(text.size()), device),
               "cuDeviceGetPCIBusId");
  return text.data();
}

std::string architecture_name(int compute_capability) {
  return fmt::format("sm_{}{}", compute_capability, compute_capability >= 90 ? "a" : "");
}

DeviceFacts read_facts(const Driver& driver, int ordinal, const std::string& toolkit) {
  const Device device(driver, ordinal);
  const auto memory_clock_khz = device.attribute(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE);
  const auto bus_bits = device.attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);

  DeviceFacts facts;
  facts.kind = DeviceKind::cuda;
  facts.name = device.name();
  facts.compute_capability =
      static_cast<int>(10 * device.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                       device.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
  facts.arch = architecture_name(facts.compute_capability);
  facts.multiprocessors =
      static_cast<int>(device.attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
  facts.registers_per_multiprocessor =
      static_cast<int>(device.attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR));
  facts.shared_bytes_per_block =
      device.attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  facts.shared_bytes_per_multiprocessor =
      device.attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  facts.l2_bytes = device.attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  facts.memory_bytes = device.memory_bytes();
  // Twice a clock, by the width of the bus: what the datasheet's number is made of.
  facts.memory_bandwidth =
      2.0 * static_cast<double>(memory_clock_khz) * 1e3 * static_cast<double>(bus_bits) / 8.0;
  facts.clock_hz = static_cast<double>(device.attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE)) * 1e3;
  facts.driver = driver.release;
  facts.toolkit = toolkit;
  facts.details = {
      {"compute capability",
       fmt::format("{}.{}", facts.compute_capability / 10, facts.compute_capability % 10)},
      {"PCI bus", pci_bus(driver, device.handle())},
      {"core clock", fmt::format("{:.0f} MHz at most", facts.clock_hz / 1e6)},
      {"memory clock", fmt::format("{:.0f} MHz", static_cast<double>(memory_clock_khz) / 1e3)},
      {"memory bus", fmt::format("{} bits", bus_bits)},
      {"ECC", device.attribute(CU_DEVICE_ATTRIBUTE_ECC_ENABLED) != 0 ? "on" : "off"},
      {"warps per SM",
       fmt::format("{} of {} threads",
                   device.attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR) /
                       device.attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE),
                   device.attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE))},
      {"shared memory reserved per block",
       fmt::format("{} bytes",
                   device.attribute(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK))},
      {"CUDA of the driver", version_text(driver.version)},
      {"NVRTC", toolkit.empty() ? "missing" : toolkit},
  };
  return facts;
}

double datasheet_flops(const DeviceFacts& facts, DType dtype) {
  struct Rates {
    int compute_capability;
    double f32, tensor_cores;
  };
  constexpr Rates known[] = {{80, 128, 2048}, {86, 256, 512},   {89, 256, 512},
                             {90, 256, 4096}, {100, 256, 8192}, {120, 256, 512}};
  double per_clock = 0;  // FLOP an SM, a multiply-add being two
  for (const Rates& rates : known)
    if (rates.compute_capability == facts.compute_capability)
      per_clock = dtype == DType::f32 ? rates.f32 : rates.tensor_cores;
  // From 8.9 on the tensor cores multiply fp8, at twice the rate; before, it is converted.
  if (dtype == DType::fp8 && facts.compute_capability >= 89) per_clock *= 2;
  return per_clock * facts.multiprocessors * facts.clock_hz;
}

}  // namespace fftune::cuda
