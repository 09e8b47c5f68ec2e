// fftune tune-presets: searches this device for the problems that preset files name, whatever
// device they are for.
#include <fmt/format.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/device_option.hpp"
#include "apps/fftune/command_line/problem_options.hpp"
#include "apps/fftune/commands.hpp"
#include "apps/fftune/presets/presets.hpp"
#include "apps/fftune/presets/records.hpp"
#include "apps/fftune/search/tune.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "tuning/log.hpp"

namespace fftune::tool {
namespace {

struct TunePresetsOptions {
  std::vector<std::string> paths;
  ProblemFilter filter;
  bool again = false;
  bool list = false;
  SearchOptions search;
};

/// The problems of the files that the filter admits and that this version knows for the kind of
/// device, each once, with the winners that the files name. Warns of the others.
std::vector<SearchedOp> problems_of(const std::vector<PresetFile>& files,
                                    const TunePresetsOptions& options, DeviceKind kind,
                                    const Session& session) {
  std::map<std::string, std::map<Problem, std::vector<Recipe>>> found;  // by the op's name
  for (const PresetFile& file : files) {
    for (const std::string& complaint : file.complaints)
      logging::warn("{}; it is skipped", complaint);
    for (const PresetRecord& record : file.records) {
      if (!admits(options.filter, record.problem)) continue;
      try {
        if (needs_group(record.problem))
          throw Error(ErrorKind::invalid_input, "link=" + needs_group_words(record.problem));
        const Op& op = session.catalog.op(record.problem.op);
        found[record.problem.op][unrepeated(op, canonical(op, record.problem, kind))].push_back(
            record.recipe());
      } catch (const Error& error) {
        logging::warn("{}: {}: {}; it is skipped", file.path.string(), record.problem.text(),
                      error.what());
      }
    }
  }
  std::vector<SearchedOp> ops;
  for (auto& [name, named] : found) {
    SearchedOp& each =
        ops.emplace_back(SearchedOp{&session.catalog.op(name), {}, std::move(named)});
    for (const auto& [problem, recipe] : each.named) each.problems.push_back(problem);
  }
  return ops;
}

/// Leaves out what --out has a record of for the device.
std::vector<SearchedOp> without_recorded(std::vector<SearchedOp> ops, const std::string& device,
                                         const TunePresetsOptions& options,
                                         const Session& session) {
  std::size_t known = 0;
  const PresetDevice preset = preset_device(facts_of_device(device, session.environment));
  for (SearchedOp& each : ops) {
    const auto own = own_records(options.search.out, preset, *each.op);
    known +=
        std::erase_if(each.problems, [&](const Problem& problem) { return own.contains(problem); });
  }
  std::erase_if(ops, [](const SearchedOp& each) { return each.problems.empty(); });
  if (known > 0)
    logging::warn("{} has records of {} already: --again searches {} too", options.search.out,
                  counted(known, "problem"), known == 1 ? "it" : "them");
  return ops;
}

int run(const TunePresetsOptions& options, const Session& session) {
  const std::vector<PresetFile> files = preset_files(options.paths);
  expect_readable(files, "search");
  if (options.list)
    return list_problems(problems_of(files, options, DeviceKind::cuda, session), session);
  return search(
      [&](const std::string& device) {
        auto ops = problems_of(files, options, kind_of_device(device), session);
        return options.again ? ops : without_recorded(std::move(ops), device, options, session);
      },
      options.search, nullptr, session);
}

}  // namespace

void add_tune_presets(CommandLine& line) {
  auto [command, options] = line.add<TunePresetsOptions>(
      line.root(), "tune-presets",
      "search this device for the problems that preset files of other devices name, and write "
      "presets",
      run);
  command.option("PATH", options.paths, "preset files, or folders of them").required = true;
  command.flag("--again", options.again,
               "problems that --out has a record of for this device as well");
  command.flag("--list", options.list, "print the problems, and search nothing");
  add_search_options(command, options.search, false);
  add_problem_filter(command, line.catalog().ops, options.filter);
}

}  // namespace fftune::tool
