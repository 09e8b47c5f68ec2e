#include "cuda/driver.hpp"

#include <fmt/format.h>

#include <sstream>
#include <type_traits>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "cuda/shared_library.hpp"

namespace fftune::cuda {
namespace {

void load_entry_points(const SharedLibrary& library, Driver& driver) {
  library.load(driver.get_error_name, "cuGetErrorName");
  library.load(driver.get_error_string, "cuGetErrorString");
  library.load(driver.init, "cuInit");
  library.load(driver.driver_get_version, "cuDriverGetVersion");
  library.load(driver.device_get_count, "cuDeviceGetCount");
  library.load(driver.device_get, "cuDeviceGet");
  library.load(driver.device_get_name, "cuDeviceGetName");
  library.load(driver.device_get_attribute, "cuDeviceGetAttribute");
  library.load(driver.device_total_mem, "cuDeviceTotalMem_v2");
  library.load(driver.device_get_pci_bus_id, "cuDeviceGetPCIBusId");
  library.load(driver.primary_ctx_retain, "cuDevicePrimaryCtxRetain");
  library.load(driver.primary_ctx_release, "cuDevicePrimaryCtxRelease_v2");
  library.load(driver.ctx_get_current, "cuCtxGetCurrent");
  library.load(driver.ctx_set_current, "cuCtxSetCurrent");
  library.load(driver.ctx_push_current, "cuCtxPushCurrent_v2");
  library.load(driver.ctx_pop_current, "cuCtxPopCurrent_v2");
  library.load(driver.module_load_data, "cuModuleLoadData");
  library.load(driver.module_unload, "cuModuleUnload");
  library.load(driver.module_get_function, "cuModuleGetFunction");
  library.load(driver.func_get_attribute, "cuFuncGetAttribute");
  library.load(driver.func_set_attribute, "cuFuncSetAttribute");
  driver.func_get_param_info =
      reinterpret_cast<decltype(driver.func_get_param_info)>(library.find("cuFuncGetParamInfo"));
  library.load(driver.occupancy_max_active_blocks, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  library.load(driver.occupancy_max_active_clusters, "cuOccupancyMaxActiveClusters");
  library.load(driver.launch_kernel, "cuLaunchKernel");
  library.load(driver.launch_kernel_ex, "cuLaunchKernelEx");
  library.load(driver.tensor_map_encode_tiled, "cuTensorMapEncodeTiled");
  library.load(driver.tensor_map_replace_address, "cuTensorMapReplaceAddress");
  library.load(driver.mem_get_info, "cuMemGetInfo_v2");
  library.load(driver.mem_alloc, "cuMemAlloc_v2");
  library.load(driver.mem_free, "cuMemFree_v2");
  library.load(driver.memcpy_htod_async, "cuMemcpyHtoDAsync_v2");
  library.load(driver.memcpy_dtoh_async, "cuMemcpyDtoHAsync_v2");
  library.load(driver.memcpy_dtod_async, "cuMemcpyDtoDAsync_v2");
  library.load(driver.memset_d8_async, "cuMemsetD8Async");
  library.load(driver.memset_d32_async, "cuMemsetD32Async");
  library.load(driver.stream_create, "cuStreamCreate");
  library.load(driver.stream_destroy, "cuStreamDestroy_v2");
  library.load(driver.stream_synchronize, "cuStreamSynchronize");
  library.load(driver.stream_begin_capture, "cuStreamBeginCapture_v2");
  library.load(driver.stream_end_capture, "cuStreamEndCapture");
  library.load(driver.event_create, "cuEventCreate");
  library.load(driver.event_destroy, "cuEventDestroy_v2");
  library.load(driver.event_record, "cuEventRecord");
  library.load(driver.event_query, "cuEventQuery");
  library.load(driver.event_elapsed_time, "cuEventElapsedTime");
  library.load(driver.graph_instantiate, "cuGraphInstantiateWithFlags");
  library.load(driver.graph_destroy, "cuGraphDestroy");
  library.load(driver.graph_exec_destroy, "cuGraphExecDestroy");
  library.load(driver.graph_upload, "cuGraphUpload");
  library.load(driver.graph_launch, "cuGraphLaunch");
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(library.find(name));
  };
  find(driver.device_can_access_peer, "cuDeviceCanAccessPeer");
  find(driver.ctx_enable_peer_access, "cuCtxEnablePeerAccess");
  find(driver.device_get_by_pci_bus_id, "cuDeviceGetByPCIBusId");
  find(driver.ipc_get_mem_handle, "cuIpcGetMemHandle");
  find(driver.ipc_open_mem_handle, "cuIpcOpenMemHandle_v2");
  find(driver.ipc_close_mem_handle, "cuIpcCloseMemHandle");
  find(driver.mem_host_alloc, "cuMemHostAlloc");
  find(driver.mem_free_host, "cuMemFreeHost");
  find(driver.mem_host_get_device_pointer, "cuMemHostGetDevicePointer_v2");
}

bool starts_release(std::string_view word) {
  return word.size() > 2 && word[0] >= '1' && word[0] <= '9' && word.find('.') != word.npos &&
         word.find_first_not_of("0123456789.") == word.npos;
}

/// From the library's file name (libcuda.so.580.159.03), else from the kernel module's own words.
std::string release_of(const SharedLibrary& library) {
  constexpr std::string_view stem = "libcuda.so.";
  const std::string file = library.path().filename().string();
  if (file.rfind(stem, 0) == 0 && starts_release(file.substr(stem.size())))
    return file.substr(stem.size());
  std::istringstream version(text_of_file("/proc/driver/nvidia/version"));
  for (std::string word; version >> word;)
    if (starts_release(word)) return word;
  return {};
}

}  // namespace

std::string Driver::words(CUresult result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (get_error_name(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown";
  if (get_error_string(result, &text) != CUDA_SUCCESS || text == nullptr)
    return fmt::format("error {} ({})", static_cast<int>(result), name);
  return fmt::format("{} ({})", text, name);
}

void Driver::accept(CUresult result, const char* what) const {
  switch (result) {
    case CUDA_SUCCESS:
      return;
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_OUT_OF_MEMORY:
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_INVALID_PTX:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_INVALID_SOURCE:
    case CUDA_ERROR_NOT_FOUND:
    case CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES:
    case CUDA_ERROR_NOT_SUPPORTED:
      throw Error(ErrorKind::unavailable, fmt::format("CUDA: {}: {}", what, words(result)));
    default:
      fail(result, what);
  }
}

void Driver::fail(CUresult result, const char* what) const {
  throw Error(ErrorKind::device_fault, fmt::format("CUDA: {}: {}", what, words(result)));
}

std::shared_ptr<const Driver> open_driver(const std::string& soname) {
  const auto library = SharedLibrary::open(soname);
  if (!library)
    throw Error(ErrorKind::unavailable,
                fmt::format("CUDA: {} is not there: install the NVIDIA driver", soname));
  auto driver = std::make_shared<Driver>();
  load_entry_points(*library, *driver);
  if (const CUresult result = driver->init(0); result != CUDA_SUCCESS)
    throw Error(ErrorKind::unavailable,
                fmt::format("CUDA: the driver does not start: cuInit: {}: check nvidia-smi",
                            driver->words(result)));
  driver->check(driver->driver_get_version(&driver->version), "cuDriverGetVersion");
  driver->release = release_of(*library);
  return driver;
}

}  // namespace fftune::cuda
