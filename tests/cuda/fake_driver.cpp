#include "cuda/fake_driver.hpp"

#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>

#include "cuda/one_device.hpp"

// Newer headers map it to a _v2 of the same signature; the library exports both.
#undef cuEventElapsedTime

namespace {

using fftune::testing::FakeDriver;
using fftune::testing::FakeLaunch;

FakeDriver state;
int some_object = 0;

CUresult result_of(std::string_view call) {
  return state.failing_call == call ? state.failure : CUDA_SUCCESS;
}

template <typename T>
CUresult make(std::string_view call, T* object) {
  if (const auto result = result_of(call); result != CUDA_SUCCESS) return result;
  ++state.live_objects;
  *object = reinterpret_cast<T>(&some_object);
  return CUDA_SUCCESS;
}

CUresult end_one() {
  --state.live_objects;
  return CUDA_SUCCESS;
}

void* host(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}

CUresult record(const CUlaunchConfig& config, void** arguments) {
  FakeLaunch launch;
  launch.grid = {config.gridDimX, config.gridDimY, config.gridDimZ};
  launch.block = {config.blockDimX, config.blockDimY, config.blockDimZ};
  launch.shared_bytes = config.sharedMemBytes;
  launch.attributes = config.numAttrs;
  launch.current = contexts.empty() ? nullptr : contexts.back();
  for (std::size_t i = 0; i < state.parameter_bytes.size(); ++i) {
    const auto* bytes = static_cast<const unsigned char*>(arguments[i]);
    launch.arguments.emplace_back(bytes, bytes + state.parameter_bytes[i]);
  }
  state.launches.push_back(launch);
  return result_of("cuLaunchKernel");
}

}  // namespace

extern "C" {

FakeDriver* fake_driver() {
  return &state;
}

CUresult cuGetErrorName(CUresult, const char** text) {
  *text = "CUDA_ERROR_FAKE";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "a fake error";
  return CUDA_SUCCESS;
}
CUresult cuInit(unsigned) {
  return result_of("cuInit");
}
CUresult cuDeviceGetName(char* name, int, CUdevice) {
  std::strcpy(name, "Fake H200");
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  static const std::map<int, int> values{
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
      {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 3201000},
      {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 6144},
      {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
  };
  const auto known = values.find(attribute);
  *value = known == values.end() ? 2048 : known->second;
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice) {
  *bytes = std::size_t{1} << 32;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  return make("cuDevicePrimaryCtxRetain", context);
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) {
  return end_one();
}
CUresult cuModuleLoadData(CUmodule* module, const void*) {
  return make("cuModuleLoadData", module);
}
CUresult cuModuleUnload(CUmodule) {
  return end_one();
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  *function = reinterpret_cast<CUfunction>(&some_object);
  return result_of("cuModuleGetFunction");
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 32;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  return result_of("cuFuncSetAttribute");
}
CUresult cuFuncGetParamInfo(CUfunction, std::size_t index, std::size_t* offset,
                            std::size_t* bytes) {
  if (index >= state.parameter_bytes.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  *bytes = state.parameter_bytes[index];
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, std::size_t) {
  *blocks = 1;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 1;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, CUstream stream, void** arguments, void**) {
  CUlaunchConfig config{gx, gy, gz, bx, by, bz, shared, stream, nullptr, 0};
  // One thread alone is the delay before a timing, which takes one number whatever the test's
  // kernels take.
  if (bx != 1) return record(config, arguments);
  const std::vector<std::size_t> kept = state.parameter_bytes;
  state.parameter_bytes = {8};
  const auto result = record(config, arguments);
  state.parameter_bytes = kept;
  return result;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction, void** arguments, void**) {
  return record(*config, arguments);
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void* address,
                                const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  map->opaque[0] = reinterpret_cast<cuuint64_t>(address);
  map->opaque[1] = 77;
  return result_of("cuTensorMapEncodeTiled");
}
CUresult cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
  map->opaque[0] = reinterpret_cast<cuuint64_t>(address);
  return CUDA_SUCCESS;
}
CUresult cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  *free = std::size_t{1} << 31;
  *total = std::size_t{1} << 32;
  return CUDA_SUCCESS;
}
CUresult cuMemAlloc_v2(CUdeviceptr* address, std::size_t bytes) {
  if (bytes > std::size_t{1} << 31) return CUDA_ERROR_OUT_OF_MEMORY;
  ++state.live_objects;
  *address = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  return CUDA_SUCCESS;
}
CUresult cuMemFree_v2(CUdeviceptr address) {
  std::free(host(address));
  return end_one();
}
CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  std::memcpy(handle, &address, sizeof address);
  return CUDA_SUCCESS;
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle, unsigned) {
  std::memcpy(address, &handle, sizeof *address);
  ++state.live_objects;
  return CUDA_SUCCESS;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr) {
  return end_one();
}
CUresult cuMemHostAlloc(void** address, std::size_t bytes, unsigned) {
  ++state.live_objects;
  *address = std::malloc(bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void* address) {
  std::free(address);
  return end_one();
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* of, unsigned) {
  *address = reinterpret_cast<CUdeviceptr>(of);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, std::size_t bytes, CUstream) {
  std::memcpy(host(to), from, bytes);
  return result_of("cuMemcpyHtoDAsync");
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, std::size_t bytes, CUstream) {
  std::memcpy(to, host(from), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream) {
  std::memcpy(host(to), host(from), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char byte, std::size_t bytes, CUstream) {
  std::memset(host(to), byte, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, std::size_t count, CUstream) {
  for (std::size_t i = 0; i < count; ++i) static_cast<unsigned*>(host(to))[i] = value;
  state.zeroed_bytes = 4 * count;
  return CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream* stream, unsigned) {
  return make("cuStreamCreate", stream);
}
CUresult cuStreamDestroy_v2(CUstream) {
  return end_one();
}
CUresult cuStreamSynchronize(CUstream) {
  return result_of("cuStreamSynchronize");
}
CUresult cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode) {
  ++state.open_captures;
  return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream, CUgraph* graph) {
  --state.open_captures;
  return make("cuStreamEndCapture", graph);
}
CUresult cuEventCreate(CUevent* event, unsigned) {
  return make("cuEventCreate", event);
}
CUresult cuEventDestroy_v2(CUevent) {
  return end_one();
}
CUresult cuEventRecord(CUevent, CUstream) {
  return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent) {
  static int asked = 0;
  if (++asked % 3 != 0) return CUDA_ERROR_NOT_READY;
  return result_of("cuEventQuery");
}
CUresult cuEventElapsedTime(float* milliseconds, CUevent, CUevent) {
  *milliseconds = 6.0f;
  return CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph, unsigned long long) {
  return make("cuGraphInstantiate", exec);
}
CUresult cuGraphDestroy(CUgraph) {
  return end_one();
}
CUresult cuGraphExecDestroy(CUgraphExec) {
  return end_one();
}
CUresult cuGraphUpload(CUgraphExec, CUstream) {
  return CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec, CUstream) {
  return result_of("cuGraphLaunch");
}

}  // extern "C"
