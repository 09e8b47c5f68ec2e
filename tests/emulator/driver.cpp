// libcuda over host memory: the entry points that fftune uses, with launches that the emulator runs
// at once. A fault is an error of every later call until the context is released, with the fault's
// text as its description.
#pragma GCC visibility push(default)
#include "cuda/one_device.hpp"
#pragma GCC visibility pop

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string_view>

#include "emulator/cubin.hpp"
#include "emulator/machine.hpp"
#include "emulator/tensor_map.hpp"

// Newer headers map it to a _v2 of the same signature; the library exports both.
#undef cuEventElapsedTime

namespace {

using namespace fftune::emulator;
using Clock = std::chrono::steady_clock;
using Work = std::function<void()>;

struct Stream {
  bool is_capturing = false;
  std::vector<Work> captured;
};

struct Event {
  Clock::time_point time;
};

struct Graph {
  std::vector<Work> work;
};

struct LoadedModule {
  Module module;
  CubinFacts facts;
};

constexpr std::size_t memory_bytes = std::size_t{16} << 30;

struct Emulator {
  std::recursive_mutex mutex;
  Device device;
  std::map<std::uint64_t, void*> pinned;
  std::string error;  // of the last failure, for cuGetErrorString
  CUresult fault = CUDA_SUCCESS;

  Emulator() {
    const auto number = [](const char* name, int otherwise) {
      const char* const text = std::getenv(name);
      return text == nullptr ? otherwise : std::atoi(text);
    };
    device.compute_capability = number("FFTUNE_EMULATOR_ARCH", 90);
    device.multiprocessors =
        number("FFTUNE_EMULATOR_SMS", device.compute_capability == 90 ? 132 : 108);
    device.copies_late = number("FFTUNE_EMULATOR_LATE", 1) != 0;
  }
};

Emulator& emulator() {
  static auto* const state = new Emulator;  // threads may outlive main
  return *state;
}

int some_object = 0;

CUresult fail(CUresult result, std::string text) {
  emulator().error = std::move(text);
  return result;
}

/// On a stream: now, or at each launch of the graph that is captured.
CUresult enqueue(CUstream handle, Work work) {
  const std::lock_guard lock(emulator().mutex);
  if (emulator().fault != CUDA_SUCCESS) return emulator().fault;
  auto* const stream = reinterpret_cast<Stream*>(handle);
  if (stream != nullptr && stream->is_capturing) {
    stream->captured.push_back(std::move(work));
    return CUDA_SUCCESS;
  }
  try {
    work();
  } catch (const Fault& fault) {
    std::fprintf(stderr, "emulator: %s\n", fault.what());
    emulator().fault = CUDA_ERROR_ILLEGAL_ADDRESS;
    emulator().error = fault.what();
  }
  return CUDA_SUCCESS;
}

CUresult state_of_device() {
  const std::lock_guard lock(emulator().mutex);
  return emulator().fault;
}

Kernel& kernel_of(CUfunction function) {
  return *reinterpret_cast<Kernel*>(function);
}

int most_threads(const Kernel& kernel) {
  const int by_registers = 65536 / ((kernel.registers + 7) / 8 * 8) / 32 * 32;
  return std::min({1024, static_cast<int>(kernel.text->most_threads), by_registers});
}

Dimensions dimensions_of(const CUlaunchConfig& config) {
  Dimensions dimensions;
  dimensions.grid = {config.gridDimX, config.gridDimY, config.gridDimZ};
  dimensions.block = {config.blockDimX, config.blockDimY, config.blockDimZ};
  dimensions.shared_bytes = config.sharedMemBytes;
  for (unsigned i = 0; i < config.numAttrs; ++i)
    if (config.attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      const auto& cluster = config.attrs[i].value.clusterDim;
      dimensions.cluster = {cluster.x, cluster.y, cluster.z};
    }
  return dimensions;
}

CUresult launch(const CUlaunchConfig& config, CUfunction function, void** arguments) {
  const Kernel& kernel = kernel_of(function);
  const Dimensions dimensions = dimensions_of(config);
  const auto& [x, y, z] = dimensions.block;
  if (x * y * z == 0 || x * y * z > static_cast<unsigned>(most_threads(kernel)) ||
      dimensions.shared_bytes > kernel.dynamic_limit)
    return fail(CUDA_ERROR_INVALID_VALUE, "a block with more threads or memory than it may have");
  std::vector<ParameterLine> parameters(kernel.text->parameter_bytes / sizeof(ParameterLine) + 1);
  for (std::size_t i = 0; i < kernel.text->parameters.size(); ++i) {
    const auto& [offset, bytes] = kernel.text->parameters[i];
    std::memcpy(reinterpret_cast<std::byte*>(parameters.data()) + offset, arguments[i], bytes);
  }
  return enqueue(config.hStream, [&kernel, dimensions, parameters] {
    Launch(kernel, dimensions, emulator().device, parameters).run();
  });
}

/// Bytes on both sides of a copy or a fill.
std::byte* device_bytes(CUdeviceptr address, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  try {
    return emulator().device.memory.check(address, bytes);
  } catch (const Fault& fault) {
    throw Fault(std::string("a copy or fill: ") + fault.what());
  }
}

template <class T, class Handle>
CUresult make(Handle* handle) {
  *handle = reinterpret_cast<Handle>(new T);
  return CUDA_SUCCESS;
}
template <class T, class Handle>
CUresult destroy(Handle handle) {
  delete reinterpret_cast<T*>(handle);
  return CUDA_SUCCESS;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuGetErrorName(CUresult result, const char** text) {
  *text = result == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : result == CUDA_ERROR_INVALID_PTX   ? "CUDA_ERROR_INVALID_PTX"
          : result == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
          : result == CUDA_ERROR_NOT_SUPPORTED ? "CUDA_ERROR_NOT_SUPPORTED"
          : result == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
                                               : "an error of the emulator";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  static thread_local std::string copy;
  const std::lock_guard lock(emulator().mutex);
  copy = emulator().error;
  *text = copy.c_str();
  return CUDA_SUCCESS;
}
CUresult cuInit(unsigned) {
#ifdef __x86_64__
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    return fail(CUDA_ERROR_NO_DEVICE, "the emulator needs AVX2");
#endif
  return CUDA_SUCCESS;
}
// NVRTC looks for tables of a driver that it finds, and does without them.
CUresult cuGetExportTable(const void**, const CUuuid*) {
  return CUDA_ERROR_NOT_FOUND;
}
CUresult cuDeviceGetName(char* name, int bytes, CUdevice) {
  std::snprintf(name, static_cast<std::size_t>(bytes), "Emulated %s",
                emulator().device.compute_capability == 90 ? "H200" : "A100");
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  const Device& device = emulator().device;
  const bool is_hopper = device.compute_capability == 90;
  const std::map<int, int> values{
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device.compute_capability / 10},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device.compute_capability % 10},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device.multiprocessors},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, is_hopper ? 232448 : 166912},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, is_hopper ? 233472 : 167936},
      {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
      {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, is_hopper ? 62914560 : 41943040},
      {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, is_hopper ? 3201000 : 1593000},
      {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, is_hopper ? 6144 : 5120},
      {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, is_hopper ? 1980000 : 1410000},
      {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, warp_lanes},
  };
  const auto known = values.find(attribute);
  if (known == values.end())
    return fail(CUDA_ERROR_INVALID_VALUE, "an attribute that the emulator does not know");
  *value = known->second;
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice) {
  *bytes = memory_bytes;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = reinterpret_cast<CUcontext>(&some_object);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) {
  const std::lock_guard lock(emulator().mutex);
  emulator().fault = CUDA_SUCCESS;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* handle, const void* image) {
  try {
    auto loaded = std::make_unique<LoadedModule>();
    loaded->facts = facts_of_cubin(static_cast<const char*>(image));
    Module& module = loaded->module;
    module.text = parse_ptx(loaded->facts.ptx);
    const std::lock_guard lock(emulator().mutex);
    for (const auto& [name, variable] : module.text.variables) {
      if (variable.space == "shared") continue;
      std::byte* const memory = emulator().device.memory.allocate(variable.bytes);
      std::memset(memory, 0, variable.bytes);
      std::memcpy(memory, variable.initial.data(), variable.initial.size());
      module.variables[name] = memory;
    }
    *handle = reinterpret_cast<CUmodule>(loaded.release());
    return CUDA_SUCCESS;
  } catch (const std::runtime_error& error) {
    return fail(CUDA_ERROR_INVALID_PTX, error.what());
  }
}
CUresult cuModuleUnload(CUmodule handle) {
  const std::lock_guard lock(emulator().mutex);
  const auto* const loaded = reinterpret_cast<LoadedModule*>(handle);
  for (const auto& [name, memory] : loaded->module.variables)
    emulator().device.memory.free(reinterpret_cast<std::uint64_t>(memory));
  delete loaded;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule handle, const char* name) {
  const std::lock_guard lock(emulator().mutex);
  auto& [module, facts] = *reinterpret_cast<LoadedModule*>(handle);
  const auto text = module.text.kernels.find(name);
  if (text == module.text.kernels.end())
    return fail(CUDA_ERROR_NOT_FOUND, "no kernel " + std::string(name));
  try {
    auto [kernel, is_new] = module.kernels.try_emplace(name);
    if (is_new) {
      kernel->second = decode(text->second, module);
      if (const auto own = facts.registers.find(name); own != facts.registers.end())
        kernel->second.registers = own->second;
    }
    *function = reinterpret_cast<CUfunction>(&kernel->second);
    return CUDA_SUCCESS;
  } catch (const std::runtime_error& error) {
    module.kernels.erase(name);
    return fail(CUDA_ERROR_INVALID_PTX, error.what());
  }
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  const Kernel& kernel = kernel_of(function);
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = most_threads(kernel);
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = kernel.registers;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      *value = static_cast<int>(kernel.shared_bytes);
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
      *value = static_cast<int>(kernel.local_bytes);
      return CUDA_SUCCESS;
    default:
      return fail(CUDA_ERROR_INVALID_VALUE, "an attribute that the emulator does not know");
  }
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    kernel_of(function).dynamic_limit = static_cast<std::size_t>(value);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetParamInfo(CUfunction function, std::size_t index, std::size_t* offset,
                            std::size_t* bytes) {
  const auto& parameters = kernel_of(function).text->parameters;
  if (index >= parameters.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = parameters[index].offset;
  *bytes = parameters[index].bytes;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads,
                                                     std::size_t shared_bytes) {
  const Kernel& kernel = kernel_of(function);
  *blocks = emulator().device.ctas_per_multiprocessor(kernel, static_cast<std::size_t>(threads),
                                                      kernel.shared_bytes + shared_bytes);
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction function,
                                      const CUlaunchConfig* config) {
  const Dimensions dimensions = dimensions_of(*config);
  const auto& [x, y, z] = dimensions.cluster;
  int blocks = 0;
  cuOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks, function,
      static_cast<int>(config->blockDimX * config->blockDimY * config->blockDimZ),
      config->sharedMemBytes);
  *clusters = blocks * emulator().device.multiprocessors / static_cast<int>(x * y * z);
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, CUstream stream,
                        void** arguments, void**) {
  return launch({gx, gy, gz, bx, by, bz, shared, stream, nullptr, 0}, function, arguments);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments,
                          void**) {
  return launch(*config, function, arguments);
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  static constexpr std::uint8_t bytes_of[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  if (type >= std::size(bytes_of) || rank < 1 || rank > 5 ||
      interleave != CU_TENSOR_MAP_INTERLEAVE_NONE)
    return fail(CUDA_ERROR_INVALID_VALUE, "a tensor map that the emulator does not know");
  TensorMap own;
  own.address = reinterpret_cast<std::uint64_t>(address);
  own.rank = static_cast<std::uint8_t>(rank);
  own.element_bytes = bytes_of[type];
  own.swizzle_bytes = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                      : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                      : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                             : 0;
  for (cuuint32_t i = 0; i < rank; ++i) {
    own.sizes[i] = sizes[i];
    own.strides[i] = i == 0 ? own.element_bytes : strides[i - 1];
    own.box[i] = static_cast<std::uint16_t>(box[i]);
    if (box[i] == 0 || box[i] > 256 || element_strides[i] != 1 || own.strides[i] == 0 ||
        (i > 0 && own.strides[i] % 16 != 0))
      return fail(CUDA_ERROR_INVALID_VALUE, "a tensor map's box or stride");
  }
  const std::size_t row = own.box[0] * own.element_bytes;
  if (row % 16 != 0 || own.address % 16 != 0 || (own.swizzle_bytes != 0 && row > own.swizzle_bytes))
    return fail(CUDA_ERROR_INVALID_VALUE, "a tensor map's row or address");
  std::memcpy(map, &own, sizeof own);
  return CUDA_SUCCESS;
}
CUresult cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
  const auto value = reinterpret_cast<std::uint64_t>(address);
  if (value % 16 != 0) return fail(CUDA_ERROR_INVALID_VALUE, "a tensor map's address");
  std::memcpy(map, &value, sizeof value);
  return CUDA_SUCCESS;
}
CUresult cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  const std::lock_guard lock(emulator().mutex);
  *free = memory_bytes - std::min(memory_bytes, emulator().device.memory.allocated_bytes());
  *total = memory_bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemAlloc_v2(CUdeviceptr* address, std::size_t bytes) {
  const std::lock_guard lock(emulator().mutex);
  Allocations& memory = emulator().device.memory;
  std::byte* allocated = nullptr;
  if (memory.allocated_bytes() + bytes <= memory_bytes) allocated = memory.allocate(bytes);
  if (allocated == nullptr) return fail(CUDA_ERROR_OUT_OF_MEMORY, "out of memory");
  *address = reinterpret_cast<CUdeviceptr>(allocated);
  return CUDA_SUCCESS;
}
CUresult cuMemFree_v2(CUdeviceptr address) {
  const std::lock_guard lock(emulator().mutex);
  return emulator().device.memory.free(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemHostAlloc(void** address, std::size_t bytes, unsigned) {
  const std::lock_guard lock(emulator().mutex);
  *address = emulator().device.memory.allocate(bytes);
  return *address != nullptr ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemFreeHost(void* address) {
  return cuMemFree_v2(reinterpret_cast<CUdeviceptr>(address));
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* of, unsigned) {
  *address = reinterpret_cast<CUdeviceptr>(of);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, std::size_t bytes,
                              CUstream stream) {
  return enqueue(stream, [=] {
    if (bytes > 0) std::memcpy(device_bytes(to, bytes), from, bytes);
  });
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  return enqueue(stream, [=] {
    if (bytes > 0) std::memcpy(to, device_bytes(from, bytes), bytes);
  });
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
                              CUstream stream) {
  return enqueue(stream, [=] {
    if (bytes > 0) std::memcpy(device_bytes(to, bytes), device_bytes(from, bytes), bytes);
  });
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char byte, std::size_t bytes, CUstream stream) {
  return enqueue(stream, [=] {
    if (bytes > 0) std::memset(device_bytes(to, bytes), byte, bytes);
  });
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, std::size_t count, CUstream stream) {
  return enqueue(stream, [=] {
    auto* const words = reinterpret_cast<unsigned*>(device_bytes(to, 4 * count));
    for (std::size_t i = 0; i < count; ++i) words[i] = value;
  });
}
CUresult cuStreamCreate(CUstream* stream, unsigned) {
  return make<Stream>(stream);
}
CUresult cuStreamDestroy_v2(CUstream stream) {
  return destroy<Stream>(stream);
}
CUresult cuStreamSynchronize(CUstream) {
  return state_of_device();
}
CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode) {
  auto* const own = reinterpret_cast<Stream*>(stream);
  own->is_capturing = true;
  own->captured.clear();
  return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  auto* const own = reinterpret_cast<Stream*>(stream);
  own->is_capturing = false;
  *graph = reinterpret_cast<CUgraph>(new Graph{std::move(own->captured)});
  return CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent* event, unsigned) {
  return make<Event>(event);
}
CUresult cuEventDestroy_v2(CUevent event) {
  return destroy<Event>(event);
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  return enqueue(stream, [=] { reinterpret_cast<Event*>(event)->time = Clock::now(); });
}
CUresult cuEventQuery(CUevent) {
  return state_of_device();
}
CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  *milliseconds = std::chrono::duration<float, std::milli>(reinterpret_cast<Event*>(end)->time -
                                                           reinterpret_cast<Event*>(start)->time)
                      .count();
  return CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long) {
  *exec = reinterpret_cast<CUgraphExec>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return CUDA_SUCCESS;
}
CUresult cuGraphDestroy(CUgraph graph) {
  return destroy<Graph>(graph);
}
CUresult cuGraphExecDestroy(CUgraphExec exec) {
  return destroy<Graph>(exec);
}
CUresult cuGraphUpload(CUgraphExec, CUstream) {
  return CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  return enqueue(stream, [graph = reinterpret_cast<Graph*>(exec)] {
    for (const Work& work : graph->work) work();
  });
}

}  // extern "C"
#pragma GCC visibility pop
