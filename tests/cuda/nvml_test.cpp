#include "cuda/nvml.hpp"

#include "cuda/fake_nvml.hpp"
#include "cuda/shared_library.hpp"
#include "support/catch.hpp"

using namespace fftune;
using namespace fftune::cuda;
using testing::FakeNvml;

namespace {

constexpr const char* bus = "0000:00:00.0";

FakeNvml& fresh_nvml() {
  FakeNvml* (*fake_nvml)() = nullptr;
  SharedLibrary::open(FFTUNE_FAKE_NVML)->load(fake_nvml, "fake_nvml");
  *fake_nvml() = {};
  return *fake_nvml();
}

std::vector<std::string> told() {
  return disturbances(Nvml::open(bus, FFTUNE_FAKE_NVML)->read());
}

using Lines = std::vector<std::string>;

}  // namespace

TEST_CASE("a machine without NVML, or whose NVML does not know the device, tells nothing") {
  auto& fake = fresh_nvml();
  CHECK_FALSE(Nvml::open(bus, "libnvidia-ml-that-is-not-there.so.1"));
  CHECK_FALSE(Nvml::open("0000:17:00.0", FFTUNE_FAKE_NVML));
  CHECK(fake.initialised == 1);
  fake.failing_call = "nvmlInit_v2";
  CHECK_FALSE(Nvml::open(bus, FFTUNE_FAKE_NVML));
}

TEST_CASE("a device of its own at full clocks is quiet, and so is one at its power cap") {
  auto& fake = fresh_nvml();
  CHECK(told().empty());
  fake.processes = 0;  // as in a container, where this process is not seen either
  CHECK(told().empty());
  fake.clock_mhz = 1400;
  fake.slowdowns = 0x4;
  CHECK(told().empty());
  fake.slowdowns = 0x1;  // no work just now
  CHECK(told().empty());
}

TEST_CASE("others on the device, and clocks that are held back, are told one by one") {
  auto& fake = fresh_nvml();
  fake.processes = 2;
  CHECK(told() == Lines{"another process uses the device"});
  fake.processes = 4;
  CHECK(told() == Lines{"3 other processes use the device"});
  fake.slowdowns = 0x40 | 0x8;
  CHECK(told() == Lines{"3 other processes use the device",
                        "its clocks are held back by a slowdown by the hardware",
                        "its clocks are held back by its temperature, by the hardware"});
  fake.processes = 1;
  fake.slowdowns = 0;
  fake.clock_mhz = 1200;
  CHECK(told() == Lines{"its clock is at 1200 of 1980 MHz"});
}

TEST_CASE("queries that NVML does not support on a device count as quiet") {
  auto& fake = fresh_nvml();
  fake.processes = 5;
  fake.failing_call = "nvmlDeviceGetComputeRunningProcesses";
  CHECK(told().empty());
  fake.processes = 1;
  fake.clock_mhz = 100;
  fake.failing_call = "nvmlDeviceGetClockInfo";
  CHECK(told().empty());
  fake.clock_mhz = 1980;
  fake.slowdowns = 0x40;
  fake.failing_call = "nvmlDeviceGetCurrentClocksThrottleReasons";
  CHECK(told().empty());
}
