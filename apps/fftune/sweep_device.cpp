#include "apps/fftune/sweep_device.hpp"

#include "apps/fftune/device_option.hpp"
#include "tuning/local_evaluator.hpp"
#include "tuning/worker/remote_evaluator.hpp"

namespace fftune::tool {

SweepDevice::SweepDevice(const std::string& name, std::uint64_t seed, bool in_process,
                         const Session& session) {
  if (!in_process) {
    // This very file, even where it has been replaced or moved since.
    evaluator_ = std::make_unique<RemoteEvaluator>(WorkerCommand{
        "/proc/self/exe", "worker", "--device", name, "--seed", std::to_string(seed)});
    return;
  }
  backend_ = open_named(name, session);
  evaluator_ = std::make_unique<LocalEvaluator>(*backend_, session.catalog, seed);
}

}  // namespace fftune::tool
