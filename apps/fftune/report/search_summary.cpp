#include "apps/fftune/report/report.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <utility>

#include "core/error.hpp"
#include "core/split.hpp"

namespace fftune::tool {

namespace {

/// The lines of one group while they are read.
struct Lines {
  std::map<std::string, Outcome> last;  // of each variant, by its id
  std::vector<BestSoFar> best;
  std::set<std::string> measured;
  double seconds = 0;
};

std::string family_of_id(const std::string& id) {
  return id.substr(0, id.find('/'));
}

/// "gate_up", or the stages of a recipe of several variants; the id's family where nothing of that
/// name is in the catalog any more.
std::string stages_of(const std::string& problem, const std::string& id, const Catalog& catalog) {
  const std::string op_name = problem.substr(0, problem.find('/'));
  const auto op = std::find_if(catalog.ops.begin(), catalog.ops.end(),
                               [&](const Op* each) { return each->name() == op_name; });
  std::vector<std::string> stages;
  for (std::size_t begin = 0; begin != id.npos;) {
    const std::size_t plus = id.find(" + ", begin);
    const std::string family = family_of_id(id.substr(begin, plus - begin));
    begin = plus == id.npos ? plus : plus + 3;
    if (op == catalog.ops.end()) return family;
    const auto& families = (*op)->families();
    const auto found = std::find_if(families.begin(), families.end(),
                                    [&](const Family* each) { return each->name() == family; });
    if (found == families.end()) return family;
    for (const auto& stage : (*found)->stages()) stages.emplace_back(stage);
  }
  return fmt::format("{}", fmt::join(stages, "+"));
}

/// `shift` takes the entry's time to the time since the search of the problem began.
void read_line(const JournalEntry& entry, double shift, Lines& lines) {
  const Outcome& outcome = entry.outcome;
  lines.seconds = std::max(lines.seconds, shift + entry.seconds);
  lines.last[outcome.id] = outcome;
  if (outcome.kind != OutcomeKind::measured) return;
  lines.measured.insert(outcome.id);
  if (lines.best.empty() || outcome.median_us < lines.best.back().microseconds)
    lines.best.push_back(
        {shift + entry.seconds, static_cast<int>(lines.measured.size()), outcome.median_us});
}

/// "bm=64,bn=128" of "family/bm=64,bn=128" as names and values.
std::vector<std::pair<std::string, std::string>> parameters_of(const std::string& id) {
  std::vector<std::pair<std::string, std::string>> parameters;
  const std::size_t slash = id.find('/');
  if (slash == id.npos) return parameters;
  for (const std::string_view word : split_at_commas(std::string_view(id).substr(slash + 1)))
    if (const std::size_t equals = word.find('='); equals != word.npos)
      parameters.emplace_back(word.substr(0, equals), word.substr(equals + 1));
  return parameters;
}

void add_parameters(const Lines& lines, GroupSearch& group) {
  std::map<std::string, std::map<std::string, ValueWorth>> found;
  for (const auto& [id, outcome] : lines.last) {
    if (outcome.kind != OutcomeKind::measured || id.find(" + ") != id.npos ||
        family_of_id(id) != family_of_id(group.winner))
      continue;
    for (const auto& [name, value] : parameters_of(id)) {
      ValueWorth& worth = found[name][value];
      worth.value = value;
      if (worth.variants++ == 0 || outcome.median_us < worth.best_us)
        worth.best_us = outcome.median_us;
    }
  }
  for (const auto& [name, values] : found) {
    if (values.size() < 2) continue;
    auto& list = group.parameters[name];
    for (const auto& [value, worth] : values) list.push_back(worth);
    std::stable_sort(list.begin(), list.end(), [](const ValueWorth& a, const ValueWorth& b) {
      return a.best_us < b.best_us;
    });
  }
}

void add_failures(const Lines& lines, GroupSearch& group) {
  std::map<std::pair<std::string, std::string>, Failures> found;
  for (const auto& [id, outcome] : lines.last) {
    if (!outcome.failed()) continue;
    const std::string kind(outcome_kind_name(outcome.kind));
    // Reasons that differ in their numbers alone are one.
    std::string key = outcome.reason;
    std::erase_if(key, [](char letter) { return letter >= '0' && letter <= '9'; });
    Failures& failures = found[{kind, key}];
    if (failures.count++ == 0) failures = {kind, outcome.reason, id, 1};
  }
  for (const auto& [key, failures] : found) group.failures.push_back(failures);
  std::stable_sort(group.failures.begin(), group.failures.end(),
                   [](const Failures& a, const Failures& b) { return a.count > b.count; });
}

GroupSearch group_of(const std::string& stages, const Lines& lines) {
  GroupSearch group;
  group.stages = stages;
  group.best = lines.best;
  group.seconds = lines.seconds;
  group.measured = static_cast<int>(lines.measured.size());
  for (const auto& [id, outcome] : lines.last) {
    group.compile_seconds += outcome.compile_seconds;
    group.cached += outcome.cached ? 1 : 0;
    if (outcome.kind == OutcomeKind::measured &&
        (group.winner.empty() || outcome.median_us < group.winner_us)) {
      group.winner = id;
      group.winner_us = outcome.median_us;
    }
  }
  add_parameters(lines, group);
  add_failures(lines, group);
  return group;
}

}  // namespace

std::vector<SearchSummary> summarise_journal(const std::filesystem::path& path,
                                             const Catalog& catalog,
                                             std::vector<std::size_t>* damaged) {
  JournalText text = read_journal(path);
  // A search that was killed leaves a torn end.
  if (text.whole_bytes < text.bytes) text.damaged_lines.pop_back();
  if (damaged) *damaged = std::move(text.damaged_lines);
  std::vector<std::string> problems;  // in the order of the search
  std::map<std::string, std::map<std::string, Lines>> lines;
  JournalHeader header;
  std::map<std::string, double> begins;  // of each problem: when the one before it ended
  double before = 0;                     // what the parts before the last header took
  double last = 0;
  for (const JournalEntry& entry : text.entries) {
    if (entry.kind == JournalEntry::Kind::header) {
      header = entry.header;
      before += std::exchange(last, 0);
    }
    if (entry.kind != JournalEntry::Kind::outcome) continue;
    auto& groups = lines[entry.problem];
    if (groups.empty()) problems.push_back(entry.problem);
    const double begin = begins.emplace(entry.problem, before + last).first->second;
    last = std::max(last, entry.seconds);
    read_line(entry, before - begin, groups[stages_of(entry.problem, entry.outcome.id, catalog)]);
  }
  if (text.entries.empty())
    throw Error(ErrorKind::invalid_input,
                fmt::format("{} is not a journal of a search: give one that `fftune OP -v` names",
                            path.string()));
  std::vector<SearchSummary> summaries;
  for (const std::string& problem : problems) {
    SearchSummary summary{path, header, problem, {}};
    for (const auto& [stages, group] : lines[problem])
      summary.groups.push_back(group_of(stages, group));
    summaries.push_back(std::move(summary));
  }
  return summaries;
}

}  // namespace fftune::tool
