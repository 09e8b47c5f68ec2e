// fftune bundle: the kernels that presets and plans need, compiled into one file.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/progress_option.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/command_line/values.hpp"
#include "apps/fftune/commands.hpp"
#include "apps/fftune/compile/bundle_jobs.hpp"
#include "apps/fftune/presets/presets.hpp"
#include "apps/fftune/terminal/interrupt.hpp"
#include "apps/fftune/terminal/progress.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/parallel_until.hpp"
#include "cuda/open.hpp"
#include "tuning/log.hpp"

namespace fftune::tool {

namespace {

struct BundleOptions {
  std::string archs;
  std::string ops;
  std::string presets;
  std::string tokens;
  std::string max_tokens;
  std::vector<std::string> problems;
  std::string out;
  std::string jobs;
  std::string progress;
};

/// The request, with problems in canonical form.
struct Wanted {
  std::set<std::string> ops;  // empty: all
  std::vector<std::int64_t> tokens;
  std::optional<std::int64_t> max_tokens;
  std::vector<ParsedProblem> problems;
};

Wanted wanted_of(const BundleOptions& options, const Catalog& catalog) {
  Wanted wanted;
  std::vector<std::string> known;
  for (const Op* op : catalog.ops) known.emplace_back(op->name());
  if (!options.ops.empty())
    for (const std::string& name : parse_words(options.ops, "--op")) {
      check_choice(name, "--op", known);
      wanted.ops.insert(name);
    }
  constexpr std::int64_t most = (std::int64_t{1} << 31) - 1;
  if (!options.tokens.empty())
    for (const std::string& word : parse_words(options.tokens, "--m"))
      wanted.tokens.push_back(parse_whole(word, "--m", 1, most));
  if (!options.max_tokens.empty())
    wanted.max_tokens = parse_whole(options.max_tokens, "--max-m", 1, most);
  for (const std::string& text : options.problems) {
    ParsedProblem parsed = problem_from_json(text, catalog);
    const Op& op = catalog.op(parsed.problem.op);
    if (!parsed.dtype_given) parsed.problem.dtype = op.dtypes(DeviceKind::cuda).front();
    parsed.problem = canonical(op, std::move(parsed.problem), DeviceKind::cuda);
    wanted.problems.push_back(std::move(parsed));
  }
  return wanted;
}

/// The problems of the presets of one architecture, or of all (empty), in canonical form; what this
/// build does not know is left out, as the library leaves it out.
std::set<Problem> preset_problems(const PresetLibrary& presets, const Catalog& catalog,
                                  const std::string& arch, const std::set<std::string>& ops) {
  std::set<Problem> problems;
  for (const PresetFile& file : presets.files()) {
    if (file.device.kind != DeviceKind::cuda) continue;
    if (!arch.empty() && file.device.arch != arch) continue;
    if (!ops.empty() && !ops.contains(file.op)) continue;
    for (const PresetRecord& record : file.records) try {
        problems.insert(canonical(catalog.op(file.op), record.problem, DeviceKind::cuda));
      } catch (const Error& error) {
        logging::warn("{}: {}; it is left out", file.path.string(), error.what());
      }
  }
  return problems;
}

std::vector<BundleJob> jobs_for(const std::string& arch, const Wanted& wanted,
                                const PresetLibrary& presets, const Catalog& catalog,
                                const std::atomic<bool>& cancel) {
  BundleJobs jobs(catalog, presets, arch);
  auto problems = preset_problems(presets, catalog, arch, wanted.ops);
  if (problems.empty() && wanted.problems.empty()) {
    problems = preset_problems(presets, catalog, "", wanted.ops);
    if (!problems.empty())
      logging::info(
          "no preset is of {}: what runs the problems of the others by default is bundled", arch);
  }
  std::set<Problem> layers;
  for (const Problem& problem : problems) {
    if (cancel) return {};
    const Op& op = catalog.op(problem.op);
    jobs.add(op, problem);
    layers.insert(problem.with_size(op.token_size(), 1));
  }
  for (const Problem& layer : layers) {
    if (cancel) return {};
    const Op& op = catalog.op(layer.op);
    for (const std::int64_t tokens : wanted.tokens)
      jobs.add(op, layer.with_size(op.token_size(), tokens));
    if (wanted.max_tokens)
      jobs.add_any_tokens(op, layer.with_size(op.token_size(), *wanted.max_tokens));
  }
  for (const ParsedProblem& parsed : wanted.problems) {
    if (cancel) return {};
    const Op& op = catalog.op(parsed.problem.op);
    if (parsed.any_tokens)
      jobs.add_any_tokens(op, parsed.problem);
    else
      jobs.add(op, parsed.problem);
    for (const std::int64_t tokens : wanted.tokens)
      jobs.add(op, parsed.problem.with_size(op.token_size(), tokens));
  }
  for (const std::string& skipped : jobs.skipped())
    logging::warn("{}: left out of {}", skipped, arch);
  return jobs.take();
}

/// Compiles on `threads` threads; the failures, one line each.
std::set<std::string> compile_all(BundleBuilder& builder, const std::vector<BundleJob>& jobs,
                                  int threads, const std::atomic<bool>& cancel,
                                  StatusLine& status) {
  std::atomic<std::size_t> done{0};
  std::mutex mutex;
  std::set<std::string> failures;
  parallel_until(jobs.size(), static_cast<std::size_t>(threads), [&](std::size_t i) {
    if (cancel) return false;
    const BundleJob& job = jobs[i];
    const auto program =
        family_of(*job.op, job.variant.family).program(job.problem, job.facts, job.variant.config);
    const CompileReport report = builder.add(job.arch, program);
    ++done;
    if (!report.failure.empty()) {
      const std::lock_guard lock(mutex);
      failures.insert(fmt::format("{}: {}: {}", job.arch, job.variant.id(), report.failure));
    }
    if (status.due())
      status.update(fmt::format("bundle: {}/{} programs", done.load(), jobs.size()));
    return true;
  });
  status.clear();
  return failures;
}

int run(const BundleOptions& options, const Session& session) {
  if (options.archs.empty())
    throw Error(ErrorKind::invalid_input, fmt::format("bundle needs --arch: give a list of {}",
                                                      fmt::join(known_architectures(), ", ")));
  if (options.out.empty())
    throw Error(ErrorKind::invalid_input, "bundle needs -o: give the file to write");
  const auto archs = parse_words(options.archs, "--arch");
  for (const std::string& arch : archs) check_choice(arch, "--arch", known_architectures());
  const Wanted wanted = wanted_of(options, session.catalog);
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const int threads =
      options.jobs.empty() ? cores : static_cast<int>(parse_whole(options.jobs, "--jobs", 1, 1024));
  StatusLine status(progress_mode(options.progress, session.output));
  require_replaceable(options.out);
  const PresetLibrary presets = load_presets(options.presets, session);

  const Interrupt interrupt;
  const auto builder = make_bundle_builder(
      *session.catalog.sources, {.cache_folder = session.environment.cache_folder,
                                 .toolkit_folders = session.environment.toolkit_folders});
  std::vector<BundleJob> jobs;
  std::map<std::string, std::size_t> programs;
  for (const std::string& arch : archs) {
    auto own = jobs_for(arch, wanted, presets, session.catalog, interrupt.requested());
    if (interrupt.requested()) return exit_interrupted;
    if (own.empty())
      throw Error(ErrorKind::invalid_input,
                  fmt::format("nothing to bundle for {}: there is no preset of a GPU{}: give "
                              "--presets with one, or --problem with what the plans will be made "
                              "for",
                              arch, wanted.ops.empty() ? "" : " for these ops"));
    programs[arch] = own.size();
    std::move(own.begin(), own.end(), std::back_inserter(jobs));
  }
  const auto failures = compile_all(*builder, jobs, threads, interrupt.requested(), status);
  if (interrupt.requested()) return exit_interrupted;
  for (const std::string& failure : failures) logging::error("{}", failure);
  if (!failures.empty())
    throw Error(ErrorKind::unavailable,
                fmt::format("{} of {} programs did not compile: nothing is written",
                            failures.size(), jobs.size()));
  const std::string bytes = builder->bytes();
  replace_file(options.out, bytes);
  session.output.line(fmt::format("wrote {}: {} of {} for {}, {}", options.out,
                                  counted(builder->kernels(), "kernel"),
                                  counted(jobs.size(), "program"), fmt::join(archs, ", "),
                                  bytes_text(static_cast<double>(bytes.size()))));
  session.output.line(fmt::format("the library takes it by FFTUNE_BUNDLE={}, or through the API",
                                  shell_word(options.out)));
  session.output.document({{"path", options.out},
                           {"kernels", builder->kernels()},
                           {"programs", programs},
                           {"bytes", bytes.size()}});
  // Files that could not be read were named; the kernels of the rest are there.
  return presets.complaints().empty() ? exit_good : exit_check_failed;
}

}  // namespace

void add_bundle(CommandLine& line) {
  auto options = std::make_shared<BundleOptions>();
  Command& command = line.add(
      line.root(), "bundle",
      "compile the presets' kernels into one file, for machines without the run-time compiler",
      [options](const Session& session) { return run(*options, session); });
  command.option("--arch LIST", options->archs,
                 fmt::format("architectures, a list of {}", fmt::join(known_architectures(), ",")));
  command.option("--op LIST", options->ops, "only presets of these ops");
  add_presets_option(command, options->presets);
  command.option(
      "--m LIST", options->tokens,
      "also the kernels of the presets' layers, and --problem's, with these numbers of tokens");
  command.option(
      "--max-m N", options->max_tokens,
      "also the kernels of plans for any number of tokens up to N of the presets' layers");
  command.option(
      "--problem JSON", options->problems,
      "also the kernels of this problem, as fftune_plan_create takes it; may be repeated");
  command.option("-o,--out FILE", options->out, "the file to write");
  command.option("--jobs N", options->jobs, "threads that compile (default: one a core)");
  add_progress_option(command, options->progress);
}

}  // namespace fftune::tool
