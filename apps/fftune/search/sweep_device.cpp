#include "apps/fftune/search/sweep_device.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/device_option.hpp"
#include "apps/fftune/commands.hpp"
#include "apps/fftune/saved/weight_options.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "runtime/devices.hpp"
#include "tuning/evaluate/local_evaluator.hpp"
#include "tuning/log.hpp"
#include "tuning/remote/remote_evaluator.hpp"
#include "tuning/worker/serve.hpp"
#include "tuning/worker/worker_evaluator.hpp"

namespace fftune::tool {

std::unique_ptr<Evaluator> start_worker(const std::string& name, const SweepData& data) {
  // This very file, even where it has been replaced or moved since.
  WorkerCommand command{"/proc/self/exe",         "worker", "--device", name, "--seed",
                        std::to_string(data.seed)};
  if (data.saved != nullptr)
    for (std::string& word : words_of(*data.saved)) command.push_back(std::move(word));
  return std::make_unique<WorkerEvaluator>(std::move(command), Watchdog{}, data.cancel);
}

SweepDevice::SweepDevice(const std::vector<std::string>& names, const SweepData& data,
                         bool in_process, const Session& session,
                         std::vector<MultiDeviceEvaluator::Device> others) {
  if (in_process) {
    backend_ = open_named(names.front(), session);
    evaluator_ = std::make_unique<LocalEvaluator>(*backend_, session.catalog,
                                                  InputData(data.seed, data.saved), -1,
                                                  CancelFlags{.references = data.cancel});
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

namespace {

/// All ranks were there when MPI ended, so they call soon.
constexpr double gathering_seconds = 60;

/// How a rank introduces a device: "3 2 cuda:1" is cuda:1, one of two devices of rank 3.
std::string introduction(int rank, std::size_t devices, const std::string& name) {
  return fmt::format("{} {} {}", rank, devices, name);
}

}  // namespace

std::vector<std::string> part_of_host(const MpiRank& self, const std::vector<std::string>& names) {
  const auto ranks = static_cast<std::size_t>(self.host_ranks);
  if (names.size() < ranks) return names;
  std::vector<std::string> part;
  for (auto at = static_cast<std::size_t>(self.on_host); at < names.size(); at += ranks)
    part.push_back(names[at]);
  return part;
}

std::vector<MultiDeviceEvaluator::Device> gather_devices(Listener& listener, int ranks) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(gathering_seconds);
  std::vector<MultiDeviceEvaluator::Device> devices;
  std::map<int, int> missing;  // devices, by rank
  for (int rank = 1; rank < ranks; ++rank) missing[rank] = -1;
  bool told = false;
  while (!missing.empty()) {
    const std::chrono::duration<double> left = until - Clock::now();
    auto caller = listener.accept(told ? left.count() : std::min(left.count(), 1.0));
    if (!caller && !told && left.count() > 1) {
      told = true;
      logging::info("waiting for the devices of {}, {} s at most",
                    counted(missing.size(), "other rank"), gathering_seconds);
      continue;
    }
    if (!caller) break;
    std::istringstream words(caller->name);
    int rank = 0, count = 0;
    std::string name;
    words >> rank >> count >> name;
    if (!missing.contains(rank)) continue;
    if (missing[rank] < 0) missing[rank] = count;
    if (--missing[rank] == 0) missing.erase(rank);
    name = fmt::format("{} of rank {}", name, rank);
    // A function can be copied, a channel cannot.
    auto channel = std::make_shared<std::unique_ptr<LineChannel>>(std::move(caller->channel));
    devices.push_back({name, [channel, name] {
                         return std::make_unique<RemoteEvaluator>(std::move(*channel), name);
                       }});
  }
  for (const auto& [rank, left] : missing)
    logging::warn("rank {} did not call within {} s: it takes no part", rank, gathering_seconds);
  return devices;
}

void serve_devices(const MpiRank& self, const std::vector<std::string>& names,
                   const SweepData& data) {
  std::vector<std::unique_ptr<LineChannel>> channels;
  for (const std::string& name : names)
    channels.push_back(connect_to(self.invitation, introduction(self.rank, names.size(), name)));
  serve_remotes(std::move(channels), [&](std::size_t i) { return start_worker(names[i], data); });
}

namespace {

struct SweepDeviceOptions {
  std::string device;
  std::uint64_t seed = 0;
  std::string op;  // of the saved values
  SavedValues weights;
};

int run(const SweepDeviceOptions& options, const Session& session) {
  std::optional<SavedInputs> saved;
  if (options.weights.given())
    saved.emplace(session.catalog, session.catalog.op(options.op), options.weights);
  const InputData data(options.seed, saved ? &*saved : nullptr);
  return serve_worker(session.catalog, data, [&] {
    return open_device(options.device, *session.catalog.sources, session.environment);
  });
}

}  // namespace

void add_worker(CommandLine& line) {
  auto [command, options] =
      line.add<SweepDeviceOptions>(line.root(), "worker", "serve a sweep, which starts it", run);
  command.group = "";  // hidden
  command.option("--device NAME", options.device, "the device to open").required = true;
  command.option("--seed N", seed(options.seed), "seed of the data");
  command.option("--op NAME", options.op, "op of the saved values");
  add_weight_options(command, options.weights);
}

}  // namespace fftune::tool
