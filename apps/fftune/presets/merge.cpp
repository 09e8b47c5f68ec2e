// fftune presets merge and install: take the records of files into a folder of presets.
#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/presets/presets.hpp"
#include "apps/fftune/presets/records.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "runtime/devices.hpp"
#include "store/preset_file.hpp"
#include "tuning/log.hpp"

namespace fftune::tool {
namespace {

struct MergeOptions {
  std::vector<std::string> paths;
  std::string out = "presets";
};

/// Takes out the records that the library would skip: they would replace records that it uses.
/// Files without another record go with them. Returns the reasons.
std::vector<std::string> take_out_skipped(std::vector<PresetFile>& files, const Session& session) {
  const Devices here = list_devices(session.environment);
  std::vector<std::string> reasons;
  for (PresetFile& file : files)
    if (const auto facts = facts_for(file.device, here))
      std::erase_if(file.records, [&](const PresetRecord& record) {
        const std::string fault = fault_of(record, *facts, session.catalog);
        if (!fault.empty())
          reasons.push_back(
              fmt::format("{}:{}: {}", file.path.string(), record.problem.text(), fault));
        return !fault.empty();
      });
  if (!reasons.empty())
    std::erase_if(files, [](const PresetFile& file) { return file.records.empty(); });
  return reasons;
}

/// Into the folder `out`, which `where` names.
int merge(const std::vector<std::string>& paths, const std::filesystem::path& out,
          const std::string& where, const Session& session) {
  std::vector<PresetFile> files = preset_files(paths);
  std::vector<std::string> left_out;
  for (const PresetFile& file : files)
    left_out.insert(left_out.end(), file.complaints.begin(), file.complaints.end());
  // A file with a record that cannot be read is left out whole: it has to be repaired first.
  std::erase_if(files, [](const PresetFile& file) { return !file.complaints.empty(); });
  const std::vector<std::string> faults = take_out_skipped(files, session);
  if (files.empty())
    throw Error(ErrorKind::invalid_input,
                fmt::format("{}; nothing was merged: repair that file",
                            left_out.empty() ? faults.front() : left_out.front()));
  for (const std::string& complaint : left_out)
    logging::warn("{}; the file is left out: repair it, and merge it again", complaint);
  for (const std::string& fault : faults) logging::warn("{}; the record is left out", fault);
  const LockWait wait = lock_wait();
  std::vector<PresetBatch> batches;
  for (const PresetFile& file : files) {
    require_out(out, file.device, file.op, wait, where);
    batches.push_back(
        {file.device, file.op, file.records, comparison_of(session.catalog, file.op)});
  }
  const auto written = merge_preset_batches(out, batches, wait);
  Json document = Json::Array();
  for (std::size_t i = 0; i < files.size(); ++i) {
    session.output.line(fmt::format("{}: {} from {}", written[i].string(),
                                    counted(files[i].records.size(), "record"),
                                    files[i].path.string()));
    document.push_back({{"path", written[i].string()},
                        {"from", files[i].path.string()},
                        {"records", files[i].records.size()}});
  }
  session.output.document(document);
  return left_out.empty() && faults.empty() ? exit_good : exit_check_failed;
}

int merge(const MergeOptions& options, const Session& session) {
  if (options.paths.empty())
    throw Error(ErrorKind::invalid_input,
                "presets merge has nothing to merge: give the files or folders to take from");
  return merge(options.paths, options.out, "--out", session);
}

int install(const MergeOptions& options, const Session& session) {
  return merge(or_presets_folder(options.paths), session.environment.user_presets,
               "the user's folder of presets (XDG_DATA_HOME)", session);
}

}  // namespace

void add_presets_merge(CommandLine& line, Command& group) {
  auto [command, options] = line.add<MergeOptions>(
      group, "merge", "take records into a folder; they replace those of the same problem there",
      merge);
  command.option("PATH", options.paths, "preset files or folders to take from");
  command.option("--out DIR", options.out, "folder to merge into");
}

void add_presets_install(CommandLine& line, Command& group) {
  auto [command, options] = line.add<MergeOptions>(
      group, "install", "take records into the user's folder, in which the library looks for them",
      install);
  command.option("PATH", options.paths, "preset files or folders to take from (default: presets)");
}

}  // namespace fftune::tool
