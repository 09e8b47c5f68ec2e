// The CUDA driver: libcuda.so.1, opened at run time, and the entry points that fftune uses.
#pragma once

#include <cuda.h>

#include <memory>
#include <string>

namespace fftune::cuda {

/// Each member is the driver function of that name. cuda.h maps a plain name to its current version
/// (cuMemAlloc to cuMemAlloc_v2); driver.cpp loads the symbol of that same version by name.
struct Driver {
  decltype(&::cuGetErrorName) get_error_name;
  decltype(&::cuGetErrorString) get_error_string;
  decltype(&::cuInit) init;
  decltype(&::cuDriverGetVersion) driver_get_version;
  decltype(&::cuDeviceGetCount) device_get_count;
  decltype(&::cuDeviceGet) device_get;
  decltype(&::cuDeviceGetName) device_get_name;
  decltype(&::cuDeviceGetAttribute) device_get_attribute;
  decltype(&::cuDeviceTotalMem) device_total_mem;
  decltype(&::cuDeviceGetPCIBusId) device_get_pci_bus_id;
  decltype(&::cuDevicePrimaryCtxRetain) primary_ctx_retain;
  decltype(&::cuDevicePrimaryCtxRelease) primary_ctx_release;
  decltype(&::cuCtxGetCurrent) ctx_get_current;
  decltype(&::cuCtxSetCurrent) ctx_set_current;
  decltype(&::cuCtxPushCurrent) ctx_push_current;
  decltype(&::cuCtxPopCurrent) ctx_pop_current;
  decltype(&::cuModuleLoadData) module_load_data;
  decltype(&::cuModuleUnload) module_unload;
  decltype(&::cuModuleGetFunction) module_get_function;
  decltype(&::cuFuncGetAttribute) func_get_attribute;
  decltype(&::cuFuncSetAttribute) func_set_attribute;
  // Since 12.4; null in an older driver.
  CUresult (*func_get_param_info)(CUfunction, std::size_t index, std::size_t* offset,
                                  std::size_t* bytes);
  decltype(&::cuOccupancyMaxActiveBlocksPerMultiprocessor) occupancy_max_active_blocks;
  decltype(&::cuOccupancyMaxActiveClusters) occupancy_max_active_clusters;
  decltype(&::cuLaunchKernel) launch_kernel;
  decltype(&::cuLaunchKernelEx) launch_kernel_ex;
  decltype(&::cuTensorMapEncodeTiled) tensor_map_encode_tiled;
  decltype(&::cuTensorMapReplaceAddress) tensor_map_replace_address;
  decltype(&::cuMemGetInfo) mem_get_info;
  decltype(&::cuMemAlloc) mem_alloc;
  decltype(&::cuMemFree) mem_free;
  decltype(&::cuMemcpyHtoDAsync) memcpy_htod_async;
  decltype(&::cuMemcpyDtoHAsync) memcpy_dtoh_async;
  decltype(&::cuMemcpyDtoDAsync) memcpy_dtod_async;
  decltype(&::cuMemsetD8Async) memset_d8_async;
  decltype(&::cuMemsetD32Async) memset_d32_async;
  decltype(&::cuStreamCreate) stream_create;
  decltype(&::cuStreamDestroy) stream_destroy;
  decltype(&::cuStreamSynchronize) stream_synchronize;
  decltype(&::cuStreamBeginCapture) stream_begin_capture;
  decltype(&::cuStreamEndCapture) stream_end_capture;
  decltype(&::cuEventCreate) event_create;
  decltype(&::cuEventDestroy) event_destroy;
  decltype(&::cuEventRecord) event_record;
  decltype(&::cuEventQuery) event_query;
  CUresult (*event_elapsed_time)(float* milliseconds, CUevent start, CUevent end);
  decltype(&::cuGraphInstantiate) graph_instantiate;
  decltype(&::cuGraphDestroy) graph_destroy;
  decltype(&::cuGraphExecDestroy) graph_exec_destroy;
  decltype(&::cuGraphUpload) graph_upload;
  decltype(&::cuGraphLaunch) graph_launch;

  // Memory that processes share; null where the library lacks one.
  decltype(&::cuDeviceCanAccessPeer) device_can_access_peer;
  decltype(&::cuCtxEnablePeerAccess) ctx_enable_peer_access;
  decltype(&::cuDeviceGetByPCIBusId) device_get_by_pci_bus_id;
  decltype(&::cuIpcGetMemHandle) ipc_get_mem_handle;
  decltype(&::cuIpcOpenMemHandle) ipc_open_mem_handle;
  decltype(&::cuIpcCloseMemHandle) ipc_close_mem_handle;
  decltype(&::cuMemHostAlloc) mem_host_alloc;
  decltype(&::cuMemFreeHost) mem_free_host;
  decltype(&::cuMemHostGetDevicePointer) mem_host_get_device_pointer;

  std::string release;  // "580.159.03", or empty if it cannot be told
  int version = 0;      // the CUDA version that it implements, 13000 for 13.0

  /// "an illegal memory access was encountered (CUDA_ERROR_ILLEGAL_ADDRESS)"
  std::string words(CUresult result) const;
  /// Throws Error(device_fault) with the driver's words unless `result` is success. `what` names
  /// the call or what was being done.
  void check(CUresult result, const char* what) const {
    if (result != CUDA_SUCCESS) fail(result, what);
  }
  /// The same, but Error(unavailable) where only this request was refused and the context lives on:
  /// the reason of a failed candidate.
  void accept(CUresult result, const char* what) const;
  [[noreturn]] void fail(CUresult result, const char* what) const;
};

/// Opens and initialises the driver. Throws Error(unavailable) if there is no driver, one that is
/// too old, or no device. Another soname is for tests.
std::shared_ptr<const Driver> open_driver(const std::string& soname = "libcuda.so.1");

}  // namespace fftune::cuda
