// The device of a sweep: opened by a worker process, or by this one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "apps/fftune/session.hpp"
#include "device/backend.hpp"
#include "tuning/evaluator.hpp"

namespace fftune::tool {

class SweepDevice {
 public:
  /// Throws like open_device().
  SweepDevice(const std::string& name, std::uint64_t seed, bool in_process, const Session& session);

  Evaluator& evaluator() { return *evaluator_; }

 private:
  std::unique_ptr<Backend> backend_;  // only in this process
  std::unique_ptr<Evaluator> evaluator_;
};

}  // namespace fftune::tool
