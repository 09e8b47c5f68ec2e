// fftune presets diff: the changes from one set of preset files to another.
#include <fmt/format.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/presets/comparison.hpp"
#include "apps/fftune/presets/presets.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"

namespace fftune::tool {

namespace {

struct DiffOptions {
  std::vector<std::string> paths;
  bool exit_code = false;
};

// By the device's folder name and the compared_part() of the problem.
using Records = std::map<std::pair<std::string, Problem>, PresetRecord>;

Records records_of(const std::string& path, const Catalog& catalog) {
  Records records;
  // A record that cannot be read would look as if it had been removed.
  for (const PresetFile& file : whole_preset_files({path}, "compared"))
    for (auto& [problem, record] : by_compared_part(file.records, comparison_of(catalog, file.op)))
      records[{file.device.slug, problem}] = std::move(record);
  return records;
}

struct Change {
  std::string device;
  std::string problem;
  std::string kind;  // "added", "removed", "winner", "time"
  std::string before;
  std::string after;
  double before_us = 0;
  double after_us = 0;
  std::optional<Comparison> verdict;  // of records that are in both
};

// Records that differ in provenance alone are equal: only what a user would notice counts.
std::vector<Change> changes(const Records& before, const Records& after) {
  std::vector<Change> found;
  const auto text = [](const PresetRecord& record) { return recipe_text(record.recipe()); };
  for (const auto& [key, record] : before) {
    const auto other = after.find(key);
    Change change{key.first, record.problem.text(),    "removed", text(record),
                  "",        record.verdict.median_us, 0,         {}};
    if (other != after.end()) {
      change.after = text(other->second);
      change.after_us = other->second.verdict.median_us;
      const bool same = same_variants(record.recipe(), other->second.recipe());
      if (same && change.before_us == change.after_us) continue;
      change.kind = same ? "time" : "winner";
      change.verdict = compare(measured_of(record.verdict), measured_of(other->second.verdict));
    }
    found.push_back(std::move(change));
  }
  for (const auto& [key, record] : after)
    if (before.find(key) == before.end())
      found.push_back({key.first,
                       record.problem.text(),
                       "added",
                       "",
                       text(record),
                       0,
                       record.verdict.median_us,
                       {}});
  return found;
}

int run(const DiffOptions& options, const Session& session) {
  if (options.paths.size() != 2)
    throw Error(
        ErrorKind::invalid_input,
        fmt::format(
            "presets diff compares two files or folders, but {} given: give the "
            "one before and the one after",
            options.paths.size() == 1 ? "one was" : fmt::format("{} were", options.paths.size())));
  const Records before = records_of(options.paths[0], session.catalog);
  const Records after = records_of(options.paths[1], session.catalog);
  const auto found = changes(before, after);
  TextTable table({{"device"},
                   {"problem"},
                   {"change"},
                   {"before µs", Align::right},
                   {"after µs", Align::right},
                   {"before / after", Align::right},
                   {"verdict"},
                   {"winner before -> after"}});
  Json document = Json::Array();
  ComparisonCounts counts;
  bool worse = false;
  for (const Change& change : found) {
    const bool both = change.before_us > 0 && change.after_us > 0;
    if (change.verdict) counts.add(*change.verdict);
    worse = worse || change.kind == "removed" || change.verdict == Comparison::slower;
    table.row({change.device, change.problem, change.kind, microseconds_text(change.before_us),
               microseconds_text(change.after_us),
               ratio_cell(both ? change.before_us / change.after_us : 0),
               change.verdict ? Cell(std::string(comparison_name(*change.verdict)),
                                     comparison_style(*change.verdict))
                              : Cell("-"),
               change.before == change.after
                   ? change.after
                   : (change.before.empty() ? "none" : change.before) + " -> " +
                         (change.after.empty() ? "none" : change.after)});
    document.push_back(
        {{"device", change.device},
         {"problem", change.problem},
         {"change", change.kind},
         {"before", change.before},
         {"after", change.after},
         {"before_us", change.before_us},
         {"after_us", change.after_us},
         {"verdict", change.verdict ? Json(comparison_name(*change.verdict)) : Json()}});
  }
  if (found.empty())
    session.output.line("no differences");
  else
    session.output.table(table);
  if (!found.empty()) session.output.line(counts.text());
  session.output.document(document);
  return options.exit_code && worse ? exit_check_failed : exit_good;
}

}  // namespace

void add_presets_diff(CommandLine& line, Command& group) {
  auto [command, options] = line.add<DiffOptions>(
      group, "diff",
      "records added, removed, or with another winner or time, and by their intervals FASTER, "
      "SLOWER, SAME or UNDECIDED; exit 0 unless --exit-code is given",
      run);
  command.option("BEFORE_AFTER", options.paths, "two preset files or folders");
  command.flag("--exit-code", options.exit_code,
               "exit 1 if a record is SLOWER or was removed: for a pipeline");
}

}  // namespace fftune::tool
