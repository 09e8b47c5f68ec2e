#include "cuda/context.hpp"

#include <fmt/format.h>

#include "core/error.hpp"

namespace fftune::cuda {
namespace {

class DeviceBuffer final : public Buffer {
 public:
  DeviceBuffer(Owned<CUdeviceptr> memory, std::size_t bytes)
      : memory_(std::move(memory)), bytes_(bytes) {}
  void* data() const override { return reinterpret_cast<void*>(memory_.get()); }
  std::size_t bytes() const override { return bytes_; }

 private:
  Owned<CUdeviceptr> memory_;
  std::size_t bytes_;
};

}  // namespace

Context::Context(std::shared_ptr<const Driver> driver, int ordinal) : driver_(std::move(driver)) {
  int count = 0;
  driver_->check(driver_->device_get_count(&count), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count)
    throw Error(
        ErrorKind::unavailable,
        fmt::format("CUDA: there is no device {}: this machine has {} (from 0)", ordinal, count));
  driver_->check(driver_->device_get(&device_, ordinal), "cuDeviceGet");
  const CUresult result = driver_->primary_ctx_retain(&handle_, device_);
  if (result != CUDA_SUCCESS)
    throw Error(ErrorKind::unavailable,
                fmt::format("CUDA: device {} cannot be opened: cuDevicePrimaryCtxRetain: {}",
                            ordinal, driver_->words(result)));
}

Context::~Context() {
  driver_->primary_ctx_release(device_);
}

Owned<CUstream> make_stream(const SharedContext& context) {
  CUstream stream = nullptr;
  const Driver& driver = context->driver();
  driver.check(driver.stream_create(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  return {context, stream, driver.stream_destroy};
}

Owned<CUevent> make_event(const SharedContext& context) {
  CUevent event = nullptr;
  const Driver& driver = context->driver();
  driver.check(driver.event_create(&event, CU_EVENT_DEFAULT), "cuEventCreate");
  return {context, event, driver.event_destroy};
}

std::unique_ptr<Buffer> allocate(const SharedContext& context, std::size_t bytes) {
  const Driver& driver = context->driver();
  CUdeviceptr address = 0;
  const CUresult result = driver.mem_alloc(&address, bytes == 0 ? 1 : bytes);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    std::size_t free = 0;
    std::size_t total = 0;
    driver.check(driver.mem_get_info(&free, &total), "cuMemGetInfo");
    throw Error(ErrorKind::unavailable,
                fmt::format("CUDA: out of device memory: {} bytes needed, {} of {} free", bytes,
                            free, total));
  }
  driver.check(result, "cuMemAlloc");
  return buffer_of(Owned<CUdeviceptr>(context, address, driver.mem_free), bytes);
}

std::unique_ptr<Buffer> buffer_of(Owned<CUdeviceptr> memory, std::size_t bytes) {
  return std::make_unique<DeviceBuffer>(std::move(memory), bytes);
}

}  // namespace fftune::cuda
