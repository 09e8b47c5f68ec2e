#include "apps/fftune/command_line/device_option.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/values.hpp"
#include "core/error.hpp"
#include "runtime/devices.hpp"
#include "tuning/log.hpp"

namespace fftune::tool {

namespace {

/// "cuda:0" for "cuda" and "cuda:00" as well.
std::string canonical_name(const std::string& word) {
  if (kind_of_device(word) == DeviceKind::cpu) return word;
  const std::size_t colon = word.find(':');
  return fmt::format("cuda:{}", colon == word.npos ? 0 : std::stoi(word.substr(colon + 1)));
}

DeviceFacts facts_among(const Devices& devices, const std::string& name) {
  std::vector<std::string> here;
  for (const DeviceListing& listing : devices.found) {
    if (listing.spec == name) return listing.facts;
    here.push_back(listing.spec);
  }
  throw Error(
      ErrorKind::unavailable,
      fmt::format("--device {} is not here: there is {}{}{}", name, fmt::join(here, ", "),
                  devices.unavailable.empty() ? "" : "; ", fmt::join(devices.unavailable, "; ")));
}

}  // namespace

void add_device_option(Command& command, std::string& value, bool several) {
  command.option(
      "--device NAME", value,
      std::string(
          several ? "cpu, cuda:N, a list of them, or all: every GPU of this machine; variants are "
                    "spread over devices of one model"
                  : "cpu or cuda:N") +
          " (default: cuda:0 where there is one, else cpu)");
}

DeviceKind kind_of_device(const std::string& name) {
  if (name == "cpu") return DeviceKind::cpu;
  const std::string ordinal = name.rfind("cuda:", 0) == 0 ? name.substr(5) : "";
  if (name == "cuda" || (!ordinal.empty() && ordinal.size() < 5 &&
                         ordinal.find_first_not_of("0123456789") == std::string::npos))
    return DeviceKind::cuda;
  throw Error(
      ErrorKind::invalid_input,
      fmt::format("--device '{}' is not a device: give cpu, cuda:0, cuda:1, …; fftune devices "
                  "lists those that are here",
                  name));
}

std::string device_named(const std::string& value, const Environment& environment) {
  return value.empty() ? default_device(environment) : canonical_name(value);
}

std::vector<std::string> devices_named(const std::string& value, const Environment& environment) {
  if (value.empty()) return {default_device(environment)};
  std::vector<std::string> names;
  if (value == "all") {
    for (const DeviceListing& listing : list_devices(environment).found)
      if (listing.facts.kind == DeviceKind::cuda) names.push_back(listing.spec);
    // The CPU is a device, but who means all GPUs does not want to wait for it.
    return names.empty() ? std::vector<std::string>{"cpu"} : names;
  }
  for (const std::string& word : parse_words(value, "--device")) {
    const std::string name = canonical_name(word);
    if (kind_of_device(name) == DeviceKind::cuda &&
        std::find(names.begin(), names.end(), name) != names.end())
      throw Error(ErrorKind::invalid_input,
                  fmt::format("--device {} has {} twice, and two searches at once on one GPU would "
                              "spoil each other's times: give it once",
                              value, name));
    names.push_back(name);
  }
  return names;
}

std::vector<std::vector<std::string>> devices_by_model(const std::string& value,
                                                       const Environment& environment) {
  const auto names = devices_named(value, environment);
  if (names.size() == 1) return {names};
  std::map<std::string, std::string> models;
  const Devices here = list_devices(environment);
  for (const std::string& name : names) models[name] = facts_among(here, name).slug();
  std::vector<std::vector<std::string>> groups;
  for (const std::string& name : names) {
    const auto same = [&](const auto& group) { return models[group.front()] == models[name]; };
    const auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end())
      groups.push_back({name});
    else
      group->push_back(name);
  }
  return groups;
}

DeviceFacts facts_of_device(const std::string& name, const Environment& environment) {
  kind_of_device(name);
  return facts_among(list_devices(environment), name);
}

std::unique_ptr<Backend> open_named(const std::string& name, const Session& session) {
  auto backend = open_device(name, *session.catalog.sources, session.environment);
  for (const std::string& warning : backend->warnings()) logging::warn("{}", warning);
  return backend;
}

}  // namespace fftune::tool
