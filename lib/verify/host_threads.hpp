// Work of a verification, on threads of the host and on the device.
#pragma once

#include <atomic>
#include <functional>

#include "core/error.hpp"
#include "device/backend.hpp"
#include "device/host_threads.hpp"
#include "device/program.hpp"

namespace fftune {

// Matrix products computed by the device, each checked on the host before it is used.

/// Whether c is a · bᵀ, by Freivalds' test: c · r is a · (bᵀ · r) for a random vector r. It takes
/// one pass over each matrix and detects any single element that is off by more than about 1e-7 of
/// the usual size of an element. Errors in the same row cancel under a random r with negligible
/// probability.
bool is_product(const DoubleProduct& product, Parallel& parallel);

/// Runs tasks as HostThreads does, and has products computed by the device under test: in float64
/// it is tens of times as fast as the host. A result is used only if is_product() confirms it on
/// the host; after a wrong one the device is not used again.
class ProvenProducts final : public Parallel {
 public:
  explicit ProvenProducts(Backend& backend) : backend_(&backend) {}
  int max_threads() const override { return threads_.max_threads(); }
  void run(int tasks, int threads, const std::function<void(int)>& body) override {
    threads_.run(tasks, threads, body);
  }
  bool multiply(const DoubleProduct& product) override;

 private:
  Backend* backend_;
  HostThreads threads_;
  bool asks_ = true;
};

// Work that is given up when a flag is set: a reference may take minutes.

class Cancelled final : public Error {
 public:
  Cancelled() : Error(ErrorKind::unavailable, "interrupted") {}
};

/// Runs tasks as `inner` does. Once `flag` is set it begins no further one and throws Cancelled.
class CancellableParallel final : public Parallel {
 public:
  /// A null `flag` is never set. Both must outlive this.
  CancellableParallel(Parallel& inner, const std::atomic<bool>* flag)
      : inner_(&inner), flag_(flag) {}
  int max_threads() const override { return inner_->max_threads(); }
  void run(int tasks, int threads, const std::function<void(int)>& body) override;
  bool multiply(const DoubleProduct& product) override;

 private:
  void check() const {
    if (flag_ != nullptr && *flag_) throw Cancelled();
  }

  Parallel* inner_;
  const std::atomic<bool>* flag_;
};

}  // namespace fftune
