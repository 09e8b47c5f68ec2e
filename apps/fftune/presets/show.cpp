// fftune presets show: the records of files as a table.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/presets/presets.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "tuning/decide/verdict.hpp"
#include "tuning/log.hpp"

namespace fftune::tool {

namespace {

struct ShowOptions {
  std::vector<std::string> paths;
};

/// Records before version 2 of the format do not say.
std::string decided_text(const Verdict& verdict) {
  const std::string decided = !verdict.decided ? "-" : *verdict.decided ? "yes" : "no";
  return verdict.disturbances.empty() ? decided : decided + ", disturbed";
}

/// Why records are not decided: a line for each where the user wants more, else for all.
void print_doubts(const PresetFile& file, const Session& session) {
  std::vector<std::string> lines;
  for (const PresetRecord& record : file.records)
    if (const auto found = doubts(record, session.catalog, file.device.kind); !found.empty())
      lines.push_back(fmt::format("undecided: {}: {}", problem_without_op(record.problem),
                                  fmt::join(found, "; ")));
  if (session.output.verbose())
    for (const std::string& line : lines) session.output.line(line);
  else if (!lines.empty())
    session.output.line(fmt::format("{} of {} undecided: -v says why", lines.size(),
                                    counted(file.records.size(), "record")));
}

void print_file(const PresetFile& file, const Session& session) {
  const Output& output = session.output;
  output.heading(
      fmt::format("{}: {} ({})", file.path.string(), file.device.name, file.device.arch));
  TextTable table({{"problem"},
                   {"winner"},
                   {"median µs", Align::right},
                   {"roofline", Align::right},
                   {"limit"},
                   {"decided"},
                   {"vs unfused", Align::right},
                   {"vs untuned", Align::right},
                   {"error", Align::right},
                   {"date"}});
  for (const PresetRecord& record : file.records) {
    const Verdict& verdict = record.verdict;
    table.row({problem_without_op(record.problem), recipe_text(record.recipe()),
               microseconds_text(verdict.median_us), limit_share_text(verdict.roofline_fraction),
               verdict.limit, decided_text(verdict), ratio_cell(verdict.unfused_ratio),
               ratio_cell(verdict.untuned_ratio.value_or(0)), error_text(record.error),
               record.provenance.date.substr(0, 10)});
  }
  output.table(table);
  print_doubts(file, session);
  output.line("");
}

int run(const ShowOptions& options, const Session& session) {
  const std::vector<PresetFile> files = preset_files(or_presets_folder(options.paths));
  expect_readable(files, "show");
  warn_of_unknown(files, session.catalog);
  Json document = Json::Array();
  for (const PresetFile& file : files) {
    for (const std::string& complaint : file.complaints)
      logging::warn("{}; it is skipped", complaint);
    if (!file.misplaced.empty()) logging::warn("{}", file.misplaced);
    if (!file.records.empty()) print_file(file, session);
    Json records = Json::Array();
    for (const PresetRecord& record : file.records) records.push_back(to_json(record));
    document.push_back({{"path", file.path.string()},
                        {"device", file.device.name},
                        {"arch", file.device.arch},
                        {"op", file.op},
                        {"records", records},
                        {"complaints", file.complaints}});
  }
  session.output.document(document);
  const bool whole = std::all_of(files.begin(), files.end(),
                                 [](const PresetFile& file) { return file.complaints.empty(); });
  return whole ? exit_good : exit_check_failed;
}

}  // namespace

void add_presets_show(CommandLine& line, Command& group) {
  auto [command, options] =
      line.add<ShowOptions>(group, "show", "the records of preset files as tables", run);
  command.option("PATH", options.paths, "preset files or folders (default: presets)");
}

}  // namespace fftune::tool
