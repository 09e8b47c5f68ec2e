// A device's primary context, and what lives in it.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "cuda/driver.hpp"
#include "device/backend.hpp"

namespace fftune::cuda {

/// Retains the primary context, which the CUDA runtime and PyTorch use as well. Whatever lives in
/// it holds a share of it, so that the order of destruction does not matter.
class Context {
 public:
  /// Throws Error(unavailable) if there is no such device or its context cannot be had.
  Context(std::shared_ptr<const Driver> driver, int ordinal);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Driver& driver() const { return *driver_; }
  CUdevice device() const { return device_; }
  CUcontext handle() const { return handle_; }

 private:
  std::shared_ptr<const Driver> driver_;
  CUdevice device_ = 0;
  CUcontext handle_ = nullptr;
};

using SharedContext = std::shared_ptr<const Context>;

/// Makes a context the calling thread's current one for a scope, and restores the one before.
/// Should that fail, the calls in the scope report it.
class Current {
 public:
  explicit Current(const Context& context)
      : context_(context),
        pushed_(context.driver().ctx_push_current(context.handle()) == CUDA_SUCCESS) {}
  ~Current() {
    CUcontext popped = nullptr;
    if (pushed_) context_.driver().ctx_pop_current(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Context& context_;
  bool pushed_;
};

/// A driver object that is destroyed in its context.
template <typename T>
class Owned {
 public:
  Owned() = default;
  Owned(SharedContext context, T object, CUresult (*destroy)(T))
      : context_(std::move(context)), object_(object), destroy_(destroy) {}
  ~Owned() { reset(); }
  Owned(Owned&& other) noexcept { *this = std::move(other); }
  Owned& operator=(Owned&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(object_, other.object_);
    std::swap(destroy_, other.destroy_);
    return *this;
  }

  T get() const { return object_; }
  const Context& context() const { return *context_; }

 private:
  void reset() {
    const SharedContext context = std::move(context_);  // outlives `current`, and may end here
    if (context == nullptr) return;
    const Current current(*context);
    destroy_(object_);  // an error here repeats an earlier one
  }

  SharedContext context_;
  T object_{};
  CUresult (*destroy_)(T) = nullptr;
};

/// A stream that does not wait for the default stream.
Owned<CUstream> make_stream(const SharedContext& context);
Owned<CUevent> make_event(const SharedContext& context);
/// Throws Error(unavailable) with the bytes needed and there.
std::unique_ptr<Buffer> allocate(const SharedContext& context, std::size_t bytes);
std::unique_ptr<Buffer> buffer_of(Owned<CUdeviceptr> memory, std::size_t bytes);

inline CUdeviceptr device_address(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}
inline CUstream as_stream(void* stream) {
  return static_cast<CUstream>(stream);
}

}  // namespace fftune::cuda
