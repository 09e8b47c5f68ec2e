// fftune presets restamp: the stale records whose kernels compile to the same PTX as before.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/presets/presets.hpp"
#include "apps/fftune/presets/records.hpp"
#include "apps/fftune/terminal/interrupt.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "core/parallel_until.hpp"
#include "cuda/open.hpp"
#include "runtime/choice.hpp"
#include "tuning/evaluate/local_evaluator.hpp"

namespace fftune::tool {
namespace {

struct RestampOptions {
  std::string since;
  std::vector<std::string> paths;
};

/// A family of a record whose sources have changed since.
struct StaleStage {
  std::size_t file = 0;
  std::size_t record = 0;
  std::size_t stage = 0;
  Program program{};
  std::string now{};       // the hash of today's sources
  std::string obstacle{};  // why its code is not known to be the same; empty: it is
};

/// The sources that records were made with, and today's.
class Restamp {
 public:
  Restamp(const RestampOptions& options, const Session& session)
      : session_(session),
        before_(session.catalog.sources->with_device_sources_of(options.since)),
        files_(whole_preset_files(or_presets_folder(options.paths), "restamped")) {}

  void find() {
    for (std::size_t file = 0; file < files_.size(); ++file) {
      const auto facts = facts_of_preset(files_[file].device);
      if (!facts) continue;
      for (std::size_t record = 0; record < files_[file].records.size(); ++record)
        find(file, record, *facts);
    }
  }

  /// Compiles what is stale from both sources.
  void compare(const std::atomic<bool>& cancel) {
    std::map<std::string, std::pair<std::unique_ptr<Compiler>, std::unique_ptr<Compiler>>> of_arch;
    for (const StaleStage& stale : stages_)
      if (auto& both = of_arch[files_[stale.file].device.arch];
          stale.obstacle.empty() && !both.first)
        both = {compiler(files_[stale.file].device.arch, before_),
                compiler(files_[stale.file].device.arch, *session_.catalog.sources)};
    parallel_until(stages_.size(), compile_threads(), [&](std::size_t i) {
      StaleStage& stale = stages_[i];
      if (!stale.obstacle.empty()) return true;
      if (cancel) return false;
      const auto& [before, now] = of_arch.at(files_[stale.file].device.arch);
      stale.obstacle = difference(before->compile(stale.program), now->compile(stale.program));
      return true;
    });
  }

  /// Gives the stages whose code is the same today's hash, and writes their files.
  void write(const LockWait& wait) {
    std::map<std::size_t, std::map<std::size_t, PresetRecord>> changed;  // by file and record
    for (const StaleStage& stale : stages_)
      if (stale.obstacle.empty()) {
        const PresetFile& file = files_[stale.file];
        auto& record =
            changed[stale.file].try_emplace(stale.record, file.records[stale.record]).first->second;
        record.stages[stale.stage].source_hash = stale.now;
      }
    for (auto& [number, records] : changed) {
      const PresetFile& file = files_[number];
      std::vector<PresetRecord> batch;
      for (auto& [place, record] : records) batch.push_back(std::move(record));
      written_.push_back(merge_preset_records(file.path.parent_path().parent_path(), file.device,
                                              file.op, batch, wait,
                                              comparison_of(session_.catalog, file.op))
                             .string());
    }
  }

  void print() const {
    std::size_t same = 0;
    std::map<std::string, std::size_t> others;
    Json all = Json::Array();
    for (const StaleStage& stale : stages_) {
      const PresetFile& file = files_[stale.file];
      const PresetRecord& record = file.records[stale.record];
      const std::string& family = record.stages[stale.stage].variant.family;
      stale.obstacle.empty() ? ++same : ++others[stale.obstacle];
      if (session_.output.verbose())
        session_.output.line(fmt::format("{}:{}: {}: {}", file.path.string(), record.problem.text(),
                                         family,
                                         stale.obstacle.empty() ? "the same" : stale.obstacle));
      all.push_back({{"path", file.path.string()},
                     {"problem", to_json(record.problem)},
                     {"family", family},
                     {"same", stale.obstacle.empty()},
                     {"obstacle", stale.obstacle}});
    }
    session_.output.line(fmt::format("{}; the same PTX as before, so no longer stale: {}",
                                     counted(stages_.size(), "stale winner"), same));
    if (!session_.output.quiet())
      for (const auto& [why, count] : others)
        session_.output.line(fmt::format("{}: {}", count, why));
    for (const std::string& path : written_) session_.output.line("wrote " + path);
    session_.output.document({{"winners", all}, {"files", written_}});
  }

 private:
  void find(std::size_t file, std::size_t place, const DeviceFacts& facts) {
    const PresetRecord& record = files_[file].records[place];
    const Op& op = session_.catalog.op(record.problem.op);
    const auto illegal = record_illegality(op, record.problem, facts, record);
    for (std::size_t i = 0; i < record.stages.size(); ++i) {
      const StageRecord& stage = record.stages[i];
      StaleStage stale{file, place, i};
      const Family* family = family_if_any(op, stage.variant.family);
      if (!illegal.empty() || !family) {
        stale.obstacle = "the record is no longer legal: fftune presets validate says why";
        stages_.push_back(std::move(stale));
        break;
      }
      stale.now = session_.catalog.sources->hash(family->sources());
      if (stale.now == stage.source_hash) continue;
      if (made_with_before(*family, stage))
        stale.program = family->program(record.problem, facts,
                                        completed(op, record.problem, facts, stage.variant).config);
      else
        stale.obstacle = "made with other sources than those of --since";
      stages_.push_back(std::move(stale));
    }
  }

  bool made_with_before(const Family& family, const StageRecord& stage) const {
    const auto sources = family.sources();
    return std::all_of(sources.begin(), sources.end(),
                       [&](const std::string& name) { return before_.has(name); }) &&
           before_.hash(sources) == stage.source_hash;
  }

  std::unique_ptr<Compiler> compiler(const std::string& arch, const SourceSet& sources) const {
    return make_cuda_compiler(arch, sources,
                              {.cache_folder = session_.environment.cache_folder,
                               .toolkit_folders = session_.environment.toolkit_folders});
  }

  static std::string difference(const CompileReport& before, const CompileReport& now) {
    if (!now.failure.empty()) return "today's kernel does not compile: " + now.failure;
    if (!before.failure.empty()) return "the older sources have no kernel of today's parameters";
    for (std::size_t i = 0; i < now.kernels.size(); ++i)
      if (before.kernels[i].ptx_hash != now.kernels[i].ptx_hash)
        return "the PTX is another: fftune refresh times it again";
    return "";
  }

  const Session& session_;
  SourceSet before_;
  std::vector<PresetFile> files_;
  std::vector<StaleStage> stages_;
  std::vector<std::string> written_;
};

int run(const RestampOptions& options, const Session& session) {
  if (options.since.empty())
    throw Error(ErrorKind::invalid_input,
                "presets restamp needs --since: give the kernels folder of an older checkout");
  Restamp restamp(options, session);
  restamp.find();
  const Interrupt interrupt;
  restamp.compare(interrupt.requested());
  if (interrupt.requested()) return exit_interrupted;
  restamp.write(lock_wait(&interrupt.requested()));
  restamp.print();
  return exit_good;
}

}  // namespace

void add_presets_restamp(CommandLine& line, Command& group) {
  auto [command, options] = line.add<RestampOptions>(
      group, "restamp",
      "give stale records the hash of the current sources if their winners compile to the "
      "same PTX as before; needs NVRTC, and no GPU",
      run);
  command.option(
      "--since DIR", options.since,
      "kernels folder of an older checkout, with the sources that records were made with");
  command.option("PATH", options.paths, "preset files or folders (default: presets)");
}

}  // namespace fftune::tool
