#include "apps/fftune/sweep_device.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "apps/fftune/device_option.hpp"
#include "core/error.hpp"
#include "tuning/evaluate/local_evaluator.hpp"
#include "tuning/worker/worker_evaluator.hpp"

namespace fftune::tool {

std::unique_ptr<Evaluator> start_worker(const std::string& name, const SweepData& data) {
  // This very file, even where it has been replaced or moved since.
  WorkerCommand command{"/proc/self/exe",         "worker", "--device", name, "--seed",
                        std::to_string(data.seed)};
  if (data.saved != nullptr)
    for (std::string& word : data.saved->words()) command.push_back(std::move(word));
  return std::make_unique<WorkerEvaluator>(std::move(command));
}

SweepDevice::SweepDevice(const std::vector<std::string>& names, const SweepData& data,
                         bool in_process, const Session& session,
                         std::vector<MultiDeviceEvaluator::Device> others) {
  if (in_process) {
    backend_ = open_named(names.front(), session);
    evaluator_ = std::make_unique<LocalEvaluator>(*backend_, session.catalog,
                                                  InputData(data.seed, data.saved));
  } else if (names.size() == 1 && others.empty()) {
    evaluator_ = start_worker(names.front(), data);
  } else {
    std::vector<MultiDeviceEvaluator::Device> devices;
    for (const std::string& name : names) {
      // One that is named again works beside itself, and is told from itself by its place.
      const bool again = std::count(names.begin(), names.end(), name) > 1;
      devices.push_back({again ? fmt::format("{} #{}", name, devices.size() + 1) : name,
                         [name, data] { return start_worker(name, data); }});
    }
    for (auto& other : others) devices.push_back(std::move(other));
    evaluator_ = std::make_unique<MultiDeviceEvaluator>(std::move(devices));
  }
  const DeviceFacts& facts = evaluator_->facts();
  const auto threads = session.environment.threads;
  if (facts.kind == DeviceKind::cpu && threads && *threads < facts.multiprocessors)
    throw Error(
        ErrorKind::invalid_input,
        fmt::format("FFTUNE_THREADS is {}, and presets of this CPU are of all its {} cores: "
                    "unset it, or start this under taskset, which makes it a device of "
                    "fewer cores with presets of its own",
                    *threads, facts.multiprocessors));
}

}  // namespace fftune::tool
