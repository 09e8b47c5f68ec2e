// The device of a sweep, or its devices: opened by a worker process each, or by this one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "apps/fftune/saved_inputs.hpp"
#include "apps/fftune/session.hpp"
#include "device/backend.hpp"
#include "tuning/evaluate/evaluator.hpp"
#include "tuning/evaluate/multi_device_evaluator.hpp"

namespace fftune::tool {

/// The contents of the sweep's tensors.
struct SweepData {
  std::uint64_t seed = 0;
  const SavedInputs* saved = nullptr;  // null: random values alone
};

/// Throws the errors of opening the device in the worker.
std::unique_ptr<Evaluator> start_worker(const std::string& name, const SweepData& data);

class SweepDevice {
 public:
  /// Several names are devices of one kind, over which variants are spread, as over `others` of
  /// other hosts. Throws like open_device(), and where FFTUNE_THREADS would have it measure
  /// less than the device; in this process there is one device alone.
  SweepDevice(const std::vector<std::string>& names, const SweepData& data, bool in_process,
              const Session& session, std::vector<MultiDeviceEvaluator::Device> others = {});

  Evaluator& evaluator() { return *evaluator_; }

 private:
  std::unique_ptr<Backend> backend_;  // only in this process
  std::unique_ptr<Evaluator> evaluator_;
};

}  // namespace fftune::tool
