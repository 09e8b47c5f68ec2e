// The threads of a verification, and the device's products beside them, which are proved before
// anything relies on them.
#pragma once

#include "device/backend.hpp"
#include "verify/host_threads.hpp"

namespace fftune {

/// Whether c is a · bᵀ, by Freivalds' test: c · r is a · (bᵀ · r) for a random vector r. It takes a
/// pass over each matrix, and finds any single element that is off by more than about 1e-7 of the
/// usual size of an element; several in a row that hide each other from a random r, as good as
/// never.
bool is_product(const DoubleProduct& product, Parallel& parallel);

/// Runs tasks as HostThreads does, and has products computed by the device under test: in float64
/// it is tens of times as fast as the host. What it returns is believed only if is_product() says
/// so, by arithmetic of the host; after one that is wrong, the device is not asked again.
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

}  // namespace fftune
