#include "apps/fftune/report/report.hpp"

#include <fmt/format.h>

#include <map>
#include <utility>

#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "core/file_access.hpp"
#include "tuning/log.hpp"

namespace fftune::tool {

namespace {

namespace fs = std::filesystem;

bool is_journal(const fs::path& path) {
  return path.extension() == ".jsonl";
}

/// The newest journal of each device and op: "<op>-<UTC time>-<process>.jsonl" sorts by time.
std::vector<fs::path> newest_journals(const fs::path& folder, ReportInput& input) {
  std::map<std::string, fs::path> newest;
  std::error_code error;
  constexpr auto skip = fs::directory_options::skip_permission_denied;
  for (fs::recursive_directory_iterator at(folder, skip, error), end; !error && at != end;
       at.increment(error)) {
    const fs::path& path = at->path();
    std::error_code other;  // what is no file is no journal
    if (!is_journal(path) || !at->is_regular_file(other)) continue;
    const std::string name = path.stem().string();
    const std::string op = name.substr(0, name.find_last_of('-', name.find_last_of('-') - 1));
    fs::path& kept = newest[(path.parent_path() / op).string()];
    if (kept.empty() || kept < path) kept = path;
  }
  if (error)
    input.left_out.push_back(
        fmt::format("{}: cannot be listed: {}", folder.string(), error.message()));
  std::vector<fs::path> paths;
  for (auto& [key, path] : newest) paths.push_back(std::move(path));
  return paths;
}

void add_file(PresetFile file, std::size_t path, ReportInput& input) {
  for (const std::string& complaint : file.complaints) input.left_out.push_back(complaint);
  if (!file.misplaced.empty()) logging::warn("{}", file.misplaced);
  if (!file.records.empty()) input.files.push_back({path, std::move(file)});
}

void add_journal(const fs::path& journal, const Catalog& catalog, ReportInput& input) try {
  std::vector<std::size_t> damaged;
  for (SearchSummary& summary : summarise_journal(journal, catalog, &damaged))
    input.searches.push_back(std::move(summary));
  if (!damaged.empty())
    input.left_out.push_back(
        fmt::format("{}: damaged and skipped: {}", journal.string(), line_numbers(damaged)));
} catch (const Error& error) {
  input.left_out.emplace_back(error.what());
}

void add_folder(const fs::path& folder, std::size_t path, const Catalog& catalog,
                ReportInput& input) {
  std::vector<PresetFile> files = read_preset_folder(folder);
  const std::vector<fs::path> journals = newest_journals(folder, input);
  if (files.empty() && journals.empty())
    throw Error(ErrorKind::invalid_input,
                fmt::format("{} holds no <device>/<op>.json and no journal: give the folder that "
                            "the devices' folders are in, or one of them",
                            folder.string()));
  for (PresetFile& file : files) add_file(std::move(file), path, input);
  for (const fs::path& journal : journals) add_journal(journal, catalog, input);
}

bool is_bench(const JsonValue& value) {
  return value.find("problems") != nullptr && value.find("device") != nullptr;
}

void add_json(const fs::path& file, std::size_t path, ReportInput& input) {
  JsonValue value;
  try {
    value = parse_json(read_whole_file(file));
  } catch (const Error& error) {
    input.left_out.push_back(fmt::format("{}: {}", file.string(), error.what()));
    return;
  }
  if (is_bench(value))
    input.benches.push_back({path, std::move(value)});
  else
    add_file(read_preset_file(file), path, input);
}

}  // namespace

ReportInput read_report_input(const std::vector<std::string>& paths, const Catalog& catalog) {
  ReportInput input;
  for (const std::string& path : paths) {
    const std::size_t index = input.paths.size();
    input.paths.push_back(path);
    std::error_code error;
    if (!fs::exists(path, error))
      throw Error(ErrorKind::invalid_input,
                  fmt::format("{} is not there: give presets, journals, or what `fftune bench "
                              "--json` printed",
                              path));
    if (fs::is_directory(path, error))
      add_folder(path, index, catalog, input);
    else if (is_journal(path))
      add_journal(path, catalog, input);
    else
      add_json(path, index, input);
  }
  if (input.files.empty() && input.searches.empty() && input.benches.empty())
    throw Error(ErrorKind::invalid_input,
                fmt::format("{}there is nothing to report on",
                            input.left_out.empty() ? "" : input.left_out.front() + ": "));
  return input;
}

}  // namespace fftune::tool
