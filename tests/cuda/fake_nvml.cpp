#include "cuda/fake_nvml.hpp"

using fftune::testing::FakeNvml;

namespace {

constexpr int success = 0;
constexpr int not_supported = 3;
constexpr int not_found = 6;
constexpr int insufficient_size = 7;

FakeNvml state;

bool fails(const char* call) {
  return state.failing_call == call;
}

}  // namespace

extern "C" {

FakeNvml* fake_nvml() {
  return &state;
}

int nvmlInit_v2() {
  if (fails("nvmlInit_v2")) return not_supported;
  ++state.initialised;
  return success;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  if (state.known_bus != bus) return not_found;
  *device = &state;
  return success;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, void* processes) {
  if (device != &state || fails("nvmlDeviceGetComputeRunningProcesses")) return not_supported;
  const bool room = *count >= state.processes;
  *count = state.processes;
  return room || processes ? success : insufficient_size;
}
int nvmlDeviceGetClockInfo(void* device, int type, unsigned* mhz) {
  if (device != &state || type != 1 || fails("nvmlDeviceGetClockInfo")) return not_supported;
  *mhz = state.clock_mhz;
  return success;
}
int nvmlDeviceGetMaxClockInfo(void* device, int type, unsigned* mhz) {
  if (device != &state || type != 1) return not_supported;
  *mhz = state.max_clock_mhz;
  return success;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void* device, unsigned long long* reasons) {
  if (device != &state || fails("nvmlDeviceGetCurrentClocksThrottleReasons")) return not_supported;
  *reasons = state.slowdowns;
  return success;
}

}  // extern "C"
