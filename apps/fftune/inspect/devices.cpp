// fftune devices: the devices here, the facts that matter to tuning, and the presets that would
// load.
#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/fftune/check/check.hpp"
#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/commands.hpp"
#include "apps/fftune/presets/presets.hpp"
#include "apps/fftune/terminal/json.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/lookup.hpp"
#include "runtime/choice.hpp"
#include "runtime/device_sources.hpp"
#include "runtime/devices.hpp"

namespace fftune::tool {

namespace {

struct DevicesOptions {
  std::string presets;
};

std::string match_text(DeviceMatch match) {
  using enum DeviceMatch;
  return value_of<DeviceMatch, std::string>(match,
                                            {{exact, "this device"},
                                             {alias, "an alias of this device"},
                                             {same_arch_and_size, "same architecture and size"},
                                             {same_arch, "same architecture"}});
}

// File and relation -> how many of all presets' problems it would serve here.
using Served = std::map<std::pair<std::string, DeviceMatch>, std::size_t>;

Served served_by(const PresetLibrary& presets, const Catalog& catalog, const DeviceFacts& facts,
                 std::size_t& unserved) {
  Served served;
  const auto records =
      checked_records(presets, catalog, facts.kind, 0, [](const Problem&) { return true; });
  for (const CheckedRecord& record : records) {
    if (!record.skipped.empty()) continue;
    const Choice choice =
        choose(catalog, catalog.op(record.problem.op), record.problem, facts, presets);
    if (choice.preset)
      ++served[{choice.preset->path.string(), choice.preset->device}];
    else
      ++unserved;
  }
  return served;
}

void print_facts(const DeviceListing& device, const Output& output) {
  const DeviceFacts& facts = device.facts;
  const bool cpu = facts.kind == DeviceKind::cpu;
  output.heading(fmt::format("{}: {}", device.spec, facts.name));
  TextTable table({{"fact"}, {"value"}});
  const auto fact = [&](const std::string& name, const std::string& value) {
    if (!value.empty()) table.row({name, value});
  };
  fact(cpu ? "vector ISA" : "architecture", facts.arch);
  if (!cpu)
    fact("compute capability",
         fmt::format("{}.{}", facts.compute_capability / 10, facts.compute_capability % 10));
  fact(cpu ? "cores" : "SMs", fmt::format("{}", facts.multiprocessors));
  if (!cpu) {
    fact("registers per SM", fmt::format("{}", facts.registers_per_multiprocessor));
    fact("shared memory per block", bytes_text(static_cast<double>(facts.shared_bytes_per_block)));
    fact("shared memory per SM",
         bytes_text(static_cast<double>(facts.shared_bytes_per_multiprocessor)));
  }
  fact(cpu ? "last-level cache" : "L2 cache", bytes_text(static_cast<double>(facts.l2_bytes)));
  fact("memory", bytes_text(static_cast<double>(facts.memory_bytes)));
  if (facts.memory_bandwidth > 0)
    fact("memory bandwidth",
         fmt::format("{:.0f} GB/s by the datasheet's formula", facts.memory_bandwidth / 1e9));
  if (facts.clock_hz > 0) fact("clock", fmt::format("{:.0f} MHz at most", facts.clock_hz / 1e6));
  fact("driver", facts.driver);
  if (!cpu) fact("NVRTC", facts.toolkit);  // the CPU's details say more of its BLAS
  for (const auto& [name, value] : facts.details) fact(name, value);
  fact("presets folder", facts.slug());
  output.table(table);
}

Json served_json(const Served& served) {
  Json json = Json::Array();
  for (const auto& [key, count] : served) {
    const auto& [path, match] = key;
    json.push_back({{"path", path}, {"problems", count}, {"match", match_text(match)}});
  }
  return json;
}

void print_served(const Served& served, const std::string& what, const Output& output) {
  for (const auto& [key, count] : served) {
    const auto& [path, match] = key;
    output.line(
        fmt::format("{} {}: {}, {}", what, path, counted(count, "problem"), match_text(match)));
  }
}

/// `here`: the presets of ./presets where other commands read them and the library does not.
Json device_report(const DeviceListing& device, const PresetLibrary& presets,
                   const PresetLibrary* here, const Session& session) {
  print_facts(device, session.output);
  Json json = to_json(device.facts);
  json["device"] = device.spec;
  std::size_t unserved = 0;
  const Served served = served_by(presets, session.catalog, device.facts, unserved);
  print_served(served, "would load", session.output);
  if (served.empty())
    session.output.line("no preset serves this device: the ops' defaults would be used");
  else if (unserved > 0)
    session.output.line(fmt::format("{} of other devices' presets would use the ops' defaults",
                                    counted(unserved, "problem")));
  json["presets"] = served_json(served);
  json["unserved_problems"] = unserved;
  if (here) {
    std::size_t unserved_here = 0;
    const Served in_here = served_by(*here, session.catalog, device.facts, unserved_here);
    print_served(in_here, "would not load", session.output);
    json["presets_here"] = served_json(in_here);
  }
  session.output.line("");
  return json;
}

/// The folder that FFTUNE_DEVICE_SOURCES names, and its files that are not as built in.
Json device_sources_report(const Session& session) {
  const auto& folder = session.environment.device_sources;
  const auto changed = changed_files(*builtin_catalog().sources, *session.catalog.sources);
  session.output.line(
      fmt::format("device sources: those of {} (FFTUNE_DEVICE_SOURCES), {}", folder.string(),
                  changed.empty() ? "all as built in"
                                  : fmt::format("not as built in: {}", fmt::join(changed, ", "))));
  return {{"folder", folder.string()}, {"changed", changed}};
}

int run(const DevicesOptions& options, const Session& session) {
  const Devices devices = list_devices(session.environment);
  // As the library looks: not in ./presets, which check, list, bench and bundle read.
  const PresetLibrary presets = options.presets.empty()
                                    ? load_presets(searched_folders(session.environment))
                                    : load_presets(options.presets, session);
  if (options.presets.empty()) warn_of_unknown(presets.files(), session.catalog);
  std::string hint;
  if (options.presets.empty() && presets_are_here())
    hint = how_to_install("presets", session.environment);
  std::optional<PresetLibrary> here;
  if (!hint.empty()) {
    here = load_presets(std::vector<std::filesystem::path>{"presets"});
    warn_of_unknown(here->files(), session.catalog);
  }
  Json document = {{"devices", Json::Array()}, {"unavailable", devices.unavailable}};
  for (const DeviceListing& device : devices.found)
    document["devices"].push_back(device_report(device, presets, here ? &*here : nullptr, session));
  for (const std::string& reason : devices.unavailable)
    session.output.line("not available: " + reason);
  if (!session.environment.device_sources.empty())
    document["device_sources"] = device_sources_report(session);
  if (!hint.empty()) session.output.line(hint + "; check, list, bench and bundle read it here");
  session.output.document(document);
  return exit_good;
}

}  // namespace

void add_devices(CommandLine& line) {
  auto [command, options] = line.add<DevicesOptions>(
      line.root(), "devices",
      "the devices of this host: facts that matter to tuning, and which presets would load", run);
  command.option("--presets DIR", options.presets,
                 "folder of presets (default: those in which the library looks)");
}

}  // namespace fftune::tool
