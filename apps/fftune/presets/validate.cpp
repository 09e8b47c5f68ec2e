// fftune presets validate: reads the files as the library would, and names all that it would skip.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <string>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/presets/presets.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "runtime/choice.hpp"
#include "runtime/devices.hpp"

namespace fftune::tool {

namespace {

struct ValidateOptions {
  std::vector<std::string> paths;
};

struct Findings {
  std::vector<std::string> faults;
  std::vector<std::string> notes;
  std::size_t stale = 0, disturbed = 0, unknown = 0;  // records with a note of each kind
};

void check_record(const PresetRecord& record, const PresetFile& file,
                  const std::optional<DeviceFacts>& facts, const Catalog& catalog,
                  Findings& findings) {
  const std::string where = fmt::format("{}:{}", file.path.string(), record.problem.text());
  if (!facts) {
    findings.notes.push_back(where + ": its device is unknown here: only its form was checked");
    ++findings.unknown;
    return;
  }
  if (const std::string fault = fault_of(record, *facts, catalog); !fault.empty()) {
    findings.faults.push_back(fmt::format("{}: {}", where, fault));
    return;
  }
  if (const auto stale = stale_families(catalog, catalog.op(record.problem.op), record);
      !stale.empty()) {
    findings.notes.push_back(fmt::format(
        "{}: stale: the sources of {} have changed since it was tuned; it is still used", where,
        fmt::join(stale, ", ")));
    ++findings.stale;
  }
  for (const std::string& disturbance : record.verdict.disturbances)
    findings.notes.push_back(fmt::format("{}: measured while disturbed: {}", where, disturbance));
  findings.disturbed += record.verdict.disturbances.empty() ? 0 : 1;
}

/// All notes where they are few or asked for, else a line for each kind.
void print_notes(const Findings& findings, const Output& output) {
  constexpr std::size_t most = 8;
  if (output.verbose() || findings.notes.size() <= most) {
    for (const std::string& note : findings.notes) output.line("note: " + note);
    return;
  }
  const auto tell = [&](std::size_t records, const char* what) {
    if (records > 0) output.line(fmt::format("note: {} {}", counted(records, "record"), what));
  };
  tell(findings.unknown, "of devices that are unknown here: only their form was checked");
  tell(findings.stale,
       "stale: kernel sources have changed since; still used, and fftune refresh times them again");
  tell(findings.disturbed, "measured while the device was disturbed");
  output.line("-v names the records");
}

int run(const ValidateOptions& options, const Session& session) {
  const std::vector<PresetFile> files = preset_files(or_presets_folder(options.paths));
  const Devices here = list_devices(session.environment);
  Findings findings;
  std::size_t records = 0;
  for (const PresetFile& file : files) {
    findings.faults.insert(findings.faults.end(), file.complaints.begin(), file.complaints.end());
    if (!file.misplaced.empty()) findings.faults.push_back(file.misplaced);
    const auto facts = facts_for(file.device, here);
    for (const PresetRecord& record : file.records)
      check_record(record, file, facts, session.catalog, findings);
    records += file.records.size();
  }
  for (const std::string& fault : findings.faults) session.output.line(fault);
  if (!session.output.quiet()) print_notes(findings, session.output);
  session.output.line(fmt::format(
      "{}, {}, {}, {}", counted(files.size(), "file"), counted(records, "readable record"),
      counted(findings.faults.size(), "fault"), counted(findings.notes.size(), "note")));
  session.output.document({{"files", files.size()},
                           {"records", records},
                           {"faults", findings.faults},
                           {"notes", findings.notes}});
  return findings.faults.empty() ? exit_good : exit_check_failed;
}

}  // namespace

void add_presets_validate(CommandLine& line, Command& group) {
  auto [command, options] = line.add<ValidateOptions>(
      group, "validate", "check files and records; exit 1 if any would be skipped", run);
  command.option("PATH", options.paths, "preset files or folders (default: presets)");
}

}  // namespace fftune::tool
