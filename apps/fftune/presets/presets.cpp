#include "apps/fftune/presets/presets.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <set>
#include <string_view>
#include <utility>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/problem_options.hpp"
#include "apps/fftune/commands.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "runtime/choice.hpp"
#include "store/preset_file.hpp"
#include "tuning/log.hpp"

namespace fftune::tool {

void add_presets(CommandLine& line) {
  Command& group = line.add_group(
      line.root(), "presets", "validate, show, compare, merge, restamp and install preset files");
  add_presets_validate(line, group);
  add_presets_show(line, group);
  add_presets_diff(line, group);
  add_presets_merge(line, group);
  add_presets_import(line, group);
  add_presets_restamp(line, group);
  add_presets_install(line, group);
}

std::vector<PresetFile> preset_files(const std::vector<std::string>& paths) {
  std::vector<PresetFile> files;
  for (const std::string& path : paths) {
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    if (!std::filesystem::exists(status))
      throw Error(ErrorKind::invalid_input,
                  fmt::format("{} is not there: give a preset file, or a folder that holds "
                              "<device>/<op>.json",
                              path));
    if (!std::filesystem::is_directory(status)) {
      files.push_back(read_preset_file(path));
      continue;
    }
    std::vector<PresetFile> below = read_preset_folder(path);
    if (below.empty())
      throw Error(ErrorKind::invalid_input,
                  fmt::format("{} holds no <device>/<op>.json: give the folder that the devices' "
                              "folders are in, or one of them",
                              path));
    for (PresetFile& file : below) files.push_back(std::move(file));
  }
  return files;
}

std::vector<PresetFile> whole_preset_files(const std::vector<std::string>& paths,
                                           const std::string& done) {
  std::vector<PresetFile> files = preset_files(paths);
  for (const PresetFile& file : files)
    if (!file.complaints.empty())
      throw Error(ErrorKind::invalid_input,
                  fmt::format("{}; nothing was {}: repair or leave out that file",
                              file.complaints.front(), done));
  return files;
}

std::vector<std::string> or_presets_folder(std::vector<std::string> paths) {
  if (paths.empty()) paths.emplace_back("presets");
  return paths;
}

std::optional<DeviceFacts> facts_of_preset(const PresetDevice& device) {
  const auto archs = known_architectures();
  if (device.kind != DeviceKind::cuda ||
      std::find(archs.begin(), archs.end(), device.arch) == archs.end())
    return std::nullopt;
  DeviceFacts facts = facts_of_architecture(device.arch);
  facts.name = device.name;
  if (device.multiprocessors > 0) facts.multiprocessors = device.multiprocessors;
  return facts;
}

std::optional<DeviceFacts> facts_for(const PresetDevice& device, const Devices& here) {
  for (const DeviceListing& listing : here.found)
    if (listing.facts.slug() == device.slug && listing.facts.kind == device.kind)
      return listing.facts;
  if (auto facts = facts_of_preset(device)) return facts;
  for (const DeviceListing& listing : here.found)
    if (device.kind == DeviceKind::cpu && listing.facts.kind == DeviceKind::cpu) {
      DeviceFacts facts = listing.facts;
      if (device.multiprocessors > 0) facts.multiprocessors = device.multiprocessors;
      return facts;
    }
  return std::nullopt;
}

namespace {

/// Why no plan is made for a record's problem on any device of the kind; empty if one is.
std::string fault_of_problem(const Problem& problem, DeviceKind kind, const Catalog& catalog) {
  try {
    return fault_of_recorded(catalog.op(problem.op), problem, kind);
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

std::string fault_of(const PresetRecord& record, const DeviceFacts& facts, const Catalog& catalog) {
  if (std::string fault = fault_of_problem(record.problem, facts.kind, catalog); !fault.empty())
    return fault;
  // A record of a file is a candidate: an error in it is a finding, and the next follows.
  try {
    return record_illegality(catalog.op(record.problem.op), record.problem, facts, record);
  } catch (const Error& error) {
    return error.what();
  }
}

void warn_of_unknown(const std::vector<PresetFile>& files, const Catalog& catalog) {
  std::string first;
  std::size_t count = 0;
  for (const PresetFile& file : files)
    for (const PresetRecord& record : file.records)
      if (const std::string fault = fault_of_problem(record.problem, file.device.kind, catalog);
          !fault.empty() && count++ == 0)
        first = fmt::format("{}:{}: {}", file.path.string(), record.problem.text(), fault);
  if (count == 1) logging::warn("{}; the library skips the record", first);
  if (count > 1)
    logging::warn(
        "{}; the library skips the record, and {} more: fftune presets validate names all", first,
        count - 1);
}

std::string problem_without_op(const Problem& problem) {
  const std::string text = problem.text();
  return text.rfind(problem.op + "/", 0) == 0 ? text.substr(problem.op.size() + 1) : text;
}

namespace {

constexpr const char* folder_here = "presets";

bool is_searched(const std::filesystem::path& folder, const Environment& environment) {
  std::error_code error;
  return std::any_of(
      environment.preset_folders.begin(), environment.preset_folders.end(),
      [&](const auto& searched) { return std::filesystem::equivalent(folder, searched, error); });
}

/// Whether the library finds every record of the file, as it is, where it looks.
bool is_installed(const PresetFile& file, const Environment& environment) {
  std::set<std::string> found;
  const auto place = std::filesystem::path(file.device.slug) / file.path.filename();
  std::error_code error;
  for (const auto& searched : environment.preset_folders)
    if (std::filesystem::exists(searched / place, error))
      for (const PresetRecord& record : read_preset_file(searched / place).records)
        found.insert(record_json(record));
  return std::all_of(file.records.begin(), file.records.end(), [&](const PresetRecord& record) {
    return found.contains(record_json(record));
  });
}

}  // namespace

void add_presets_option(Command& command, std::string& value) {
  command.option("--presets DIR", value,
                 "folder of presets (default: ./presets where it is there, else those the library "
                 "searches)");
}

std::vector<std::filesystem::path> preset_folders(const std::string& value,
                                                  const Environment& environment) {
  std::error_code error;
  if (!value.empty()) {
    if (!std::filesystem::is_directory(value, error))
      throw Error(
          ErrorKind::invalid_input,
          fmt::format("--presets {} is not a folder: give one that holds <device>/<op>.json",
                      value));
    return {value};
  }
  if (presets_are_here()) return {folder_here};
  return searched_folders(environment);
}

std::vector<std::filesystem::path> searched_folders(const Environment& environment) {
  for (const std::string& complaint : environment.preset_complaints) logging::warn("{}", complaint);
  return environment.preset_folders;
}

bool presets_are_here() {
  std::error_code error;
  return std::filesystem::is_directory(folder_here, error);
}

std::string how_to_install(const std::filesystem::path& folder, const Environment& environment) {
  if (is_searched(folder, environment)) return "";
  const auto files = read_preset_folder(folder);
  if (std::all_of(files.begin(), files.end(),
                  [&](const PresetFile& file) { return is_installed(file, environment); }))
    return "";
  return fmt::format("the library does not look in {}: fftune presets install {} takes it to {}",
                     folder.string(), shell_word(folder.string()),
                     environment.user_presets.string());
}

PresetLibrary load_presets(const std::string& value, const Session& session) {
  PresetLibrary library = load_presets(preset_folders(value, session.environment));
  if (value.empty() && presets_are_here() && !is_searched(folder_here, session.environment)) {
    const auto hint = how_to_install(folder_here, session.environment);
    logging::info("reading ./presets, which is here{}{}", hint.empty() ? "" : "; ", hint);
  }
  if (!value.empty() && library.files().empty())
    throw Error(ErrorKind::invalid_input,
                fmt::format("--presets {} holds no <device>/<op>.json: give the folder that the "
                            "devices' folders are in, or one of them",
                            value));
  warn_of_unknown(library.files(), session.catalog);
  return library;
}

void expect_readable(const std::vector<PresetFile>& files, std::string_view purpose) {
  const bool readable = std::any_of(files.begin(), files.end(), [](const PresetFile& file) {
    return file.complaints.empty() || !file.records.empty();
  });
  if (!readable)
    throw Error(ErrorKind::invalid_input, fmt::format("{}; nothing else is there to {}",
                                                      files.front().complaints.front(), purpose));
}

PresetLibrary load_presets(const std::vector<std::filesystem::path>& folders) {
  PresetLibrary library = PresetLibrary::load(folders);
  for (const std::string& complaint : library.complaints())
    logging::warn("{}; it is skipped", complaint);
  for (const PresetFile& file : library.files())
    if (!file.misplaced.empty()) logging::warn("{}", file.misplaced);
  return library;
}

}  // namespace fftune::tool
