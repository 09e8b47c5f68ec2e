// One backend's stream in a primary context, and how work on it is captured and timed.
#pragma once

#include <cuda.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "cuda/context.hpp"
#include "cuda/kernel_pool.hpp"
#include "cuda/nvrtc.hpp"
#include "device/backend.hpp"

namespace fftune::cuda {

class Session {
 public:
  using LoadDelay = std::function<std::shared_ptr<const LoadedKernel>()>;

  /// The context must be current. `load_delay` is called when something is first timed.
  Session(SharedContext context, double clock_hz, LoadDelay load_delay);

  const SharedContext& context() const { return context_; }
  const Driver& driver() const { return context_->driver(); }
  CUstream stream() const { return stream_.get(); }

  /// A valid device address, for encoding tensor maps whose real address is patched in each run.
  void* placeholder() const { return placeholder_->data(); }

  /// Waits for the stream; throws Error(device_fault) with the driver's words.
  void synchronize() const;

  /// Keeps the stream busy for about this long.
  void enqueue_delay(double seconds) const;

 private:
  SharedContext context_;
  Owned<CUstream> stream_;
  std::unique_ptr<Buffer> placeholder_;
  double clock_hz_;
  LoadDelay load_delay_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const LoadedKernel> delay_;
};

/// Copies on the device, in the session's stream. The context must be current.
void copy(const Session& session, void* to, const void* from, std::size_t bytes);

/// Records `passes` calls of `enqueue` into a CUDA graph and uploads it. The context must be
/// current. Throws what `enqueue` throws, Error(device_fault) if the driver refuses.
std::unique_ptr<Replay> capture(const std::shared_ptr<const Session>& session, int passes,
                                const std::function<void(int pass, void* stream)>& enqueue);

// A kernel that does nothing for a while.
//
// The device runs it while the host submits what is to be timed, so that the time between two
// events holds none of the host's own.

/// Its one parameter is a std::int64_t, the clock cycles to wait. Throws Error(unavailable) if it
/// does not compile.
std::shared_ptr<const LoadedKernel> load_delay_kernel(const SharedContext& context,
                                                      const std::shared_ptr<const Nvrtc>& nvrtc,
                                                      const std::string& arch,
                                                      const std::filesystem::path& cache_folder);

}  // namespace fftune::cuda
