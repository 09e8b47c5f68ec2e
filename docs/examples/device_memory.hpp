// Memory of a device by the CUDA driver. Part of the example run_model.cpp.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

[[noreturn]] inline void fail(const std::string& what) {
  throw std::runtime_error(what);
}

/// The CPU's, or a GPU's in its primary context, which the library uses too.
class Memory {
 public:
  explicit Memory(int device) {
    if (device < 0) return;
    driver_ = ::dlopen("libcuda.so.1", RTLD_NOW);
    if (driver_ == nullptr) fail("there is no CUDA driver (libcuda.so.1) here");
    void* context = nullptr;
    int handle = 0;
    call<unsigned>("cuInit", 0u);
    call<int*, int>("cuDeviceGet", &handle, device);
    call<void**, int>("cuDevicePrimaryCtxRetain", &context, handle);
    call<void*>("cuCtxSetCurrent", context);
  }

  void* allocate(std::size_t bytes) {
    bytes = (std::max<std::size_t>(bytes, 1) + 255) / 256 * 256;
    if (driver_ == nullptr) {
      void* const memory = std::aligned_alloc(256, bytes);
      return memory ? memory : (fail("out of memory"), nullptr);
    }
    std::uint64_t address = 0;
    call<std::uint64_t*, std::size_t>("cuMemAlloc_v2", &address, bytes);
    return reinterpret_cast<void*>(address);
  }
  void write(void* to, const void* from, std::size_t bytes) {
    if (driver_ == nullptr)
      std::memcpy(to, from, bytes);
    else
      call<void*, const void*, std::size_t>("cuMemcpyHtoD_v2", to, from, bytes);
  }
  void copy(void* to, const void* from, std::size_t bytes) {
    if (driver_ == nullptr)
      std::memcpy(to, from, bytes);
    else
      call<void*, const void*, std::size_t>("cuMemcpyDtoD_v2", to, from, bytes);
  }
  /// After all that was enqueued before.
  void read(void* to, const void* from, std::size_t bytes) {
    if (driver_ == nullptr)
      std::memcpy(to, from, bytes);
    else
      call<void*, const void*, std::size_t>("cuMemcpyDtoH_v2", to, from, bytes);
  }

  /// Bytes that a copy reads and writes in a second.
  double copy_rate() {
    constexpr std::size_t bytes = std::size_t{256} << 20;
    void *const from = allocate(bytes), *const to = allocate(bytes);
    std::uint32_t end = 0;
    double fastest = std::numeric_limits<double>::infinity();
    constexpr int times = 10;
    // The first touches the memory. Other work on the machine makes some of them longer.
    for (int round = 0; round < 6; ++round) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < times; ++i) copy(to, from, bytes);
      read(&end, to, sizeof end);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      fastest = std::min(fastest, seconds.count());
    }
    return 2.0 * times * static_cast<double>(bytes) / fastest;
  }

 private:
  template <typename... Args>
  void call(const char* name, Args... args) {
    const auto function = reinterpret_cast<int (*)(Args...)>(::dlsym(driver_, name));
    const int status = function ? function(args...) : -1;
    if (status != 0) fail(std::string(name) + " failed with " + std::to_string(status));
  }

  void* driver_ = nullptr;
};
