#include "apps/fftune/team.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <map>
#include <memory>
#include <sstream>
#include <thread>
#include <utility>

#include "tuning/remote/remote_evaluator.hpp"

namespace fftune::tool {
namespace {

/// All ranks were there when MPI ended, so they call soon.
constexpr double gathering_seconds = 60;

/// How a rank introduces a device: "3 2 cuda:1" is cuda:1, one of two devices of rank 3.
std::string introduction(int rank, std::size_t devices, const std::string& name) {
  return fmt::format("{} {} {}", rank, devices, name);
}

}  // namespace

std::vector<std::string> part_of_host(const Place& place, const std::vector<std::string>& names) {
  const auto ranks = static_cast<std::size_t>(place.host_ranks);
  if (names.size() < ranks) return names;
  std::vector<std::string> part;
  for (auto at = static_cast<std::size_t>(place.on_host); at < names.size(); at += ranks)
    part.push_back(names[at]);
  return part;
}

std::vector<MultiDeviceEvaluator::Device> gather_devices(Listener& listener, int ranks) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(gathering_seconds);
  std::vector<MultiDeviceEvaluator::Device> devices;
  std::map<int, int> missing;  // devices, by rank
  for (int rank = 1; rank < ranks; ++rank) missing[rank] = -1;
  while (!missing.empty()) {
    const std::chrono::duration<double> left = until - Clock::now();
    auto caller = listener.accept(left.count());
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
    spdlog::warn("rank {} did not call within {} s: it takes no part", rank, gathering_seconds);
  return devices;
}

void serve_devices(const Place& place, const std::vector<std::string>& names,
                   const SweepData& data) {
  std::vector<std::unique_ptr<LineChannel>> channels;
  for (const std::string& name : names)
    channels.push_back(connect_to(place.invitation, introduction(place.rank, names.size(), name)));
  std::vector<std::jthread> serving;
  for (std::size_t i = 0; i < names.size(); ++i)
    serving.emplace_back([&channel = *channels[i], &name = names[i], &data] {
      serve_remote(channel, [&] { return start_worker(name, data); });
    });
}

}  // namespace fftune::tool
