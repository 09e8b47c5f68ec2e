// fftune bundle: the kernels that presets and plans need, compiled into one file.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/progress_option.hpp"
#include "apps/fftune/command_line/session.hpp"
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
  std::vector<std::string> archs;
  std::vector<std::string> ops;
  std::string presets;
  std::vector<std::int64_t> tokens;
  std::int64_t max_tokens = 0;  // 0: no plans for any number of tokens
  std::vector<std::string> problems;
  std::string out;
  int jobs = 0;  // 0: one a core
  std::string progress;
};

/// The problems that are asked for, in canonical form.
std::vector<ParsedProblem> parsed_problems(const std::vector<std::string>& texts,
                                           const Catalog& catalog) {
  std::vector<ParsedProblem> problems;
  for (const std::string& text : texts) {
    ParsedProblem parsed = problem_from_json(text, catalog);
    const Op& op = catalog.op(parsed.problem.op);
    if (!parsed.dtype_given) parsed.problem.dtype = op.dtypes(DeviceKind::cuda).front();
    parsed.problem = canonical(op, std::move(parsed.problem), DeviceKind::cuda);
    problems.push_back(std::move(parsed));
  }
  return problems;
}

/// The problems of the presets of one architecture, or of all (empty), in canonical form; what this
/// build does not know is left out, as the library leaves it out.
std::set<Problem> preset_problems(const PresetLibrary& presets, const Catalog& catalog,
                                  const std::string& arch, const std::vector<std::string>& ops) {
  std::set<Problem> problems;
  for (const PresetFile& file : presets.files()) {
    if (file.device.kind != DeviceKind::cuda) continue;
    if (!arch.empty() && file.device.arch != arch) continue;
    if (!ops.empty() && std::find(ops.begin(), ops.end(), file.op) == ops.end()) continue;
    for (const PresetRecord& record : file.records) try {
        problems.insert(canonical(catalog.op(file.op), record.problem, DeviceKind::cuda));
      } catch (const Error& error) {
        logging::warn("{}: {}; it is left out", file.path.string(), error.what());
      }
  }
  return problems;
}

std::vector<BundleJob> jobs_for(const std::string& arch, const BundleOptions& options,
                                const std::vector<ParsedProblem>& wanted,
                                const PresetLibrary& presets, const Catalog& catalog,
                                const std::atomic<bool>& cancel) {
  BundleJobs jobs(catalog, presets, arch);
  auto problems = preset_problems(presets, catalog, arch, options.ops);
  if (problems.empty() && wanted.empty()) {
    problems = preset_problems(presets, catalog, "", options.ops);
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
    for (const std::int64_t tokens : options.tokens)
      jobs.add(op, layer.with_size(op.token_size(), tokens));
    if (options.max_tokens > 0)
      jobs.add_any_tokens(op, layer.with_size(op.token_size(), options.max_tokens));
  }
  for (const ParsedProblem& parsed : wanted) {
    if (cancel) return {};
    const Op& op = catalog.op(parsed.problem.op);
    if (parsed.any_tokens)
      jobs.add_any_tokens(op, parsed.problem);
    else
      jobs.add(op, parsed.problem);
    for (const std::int64_t tokens : options.tokens)
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
  const auto wanted = parsed_problems(options.problems, session.catalog);
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const int threads = options.jobs > 0 ? options.jobs : cores;
  StatusLine status(progress_mode(options.progress, session.output));
  require_replaceable(options.out);
  const PresetLibrary presets = load_presets(options.presets, session);

  const Interrupt interrupt;
  const auto builder = make_bundle_builder(
      *session.catalog.sources, {.cache_folder = session.environment.cache_folder,
                                 .toolkit_folders = session.environment.toolkit_folders});
  std::vector<BundleJob> jobs;
  std::map<std::string, std::size_t> programs;
  for (const std::string& arch : options.archs) {
    auto own = jobs_for(arch, options, wanted, presets, session.catalog, interrupt.requested());
    if (interrupt.requested()) return exit_interrupted;
    if (own.empty())
      throw Error(ErrorKind::invalid_input,
                  fmt::format("nothing to bundle for {}: there is no preset of a GPU{}: give "
                              "--presets with one, or --problem with what the plans will be made "
                              "for",
                              arch, options.ops.empty() ? "" : " for these ops"));
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
                                  counted(jobs.size(), "program"), fmt::join(options.archs, ", "),
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
  auto [command, options] = line.add<BundleOptions>(
      line.root(), "bundle",
      "compile the presets' kernels into one file, for machines without the run-time compiler",
      run);
  constexpr std::int64_t most = (std::int64_t{1} << 31) - 1;
  command.option("--arch LIST", words(options.archs, known_architectures()),
                 fmt::format("architectures, a list of {}", fmt::join(known_architectures(), ",")));
  command.option("--op LIST", words(options.ops, line.op_names()), "only presets of these ops");
  add_presets_option(command, options.presets);
  command.option(
      "--m LIST", whole_list(options.tokens, 1, most),
      "also the kernels of the presets' layers, and --problem's, with these numbers of tokens");
  command.option(
      "--max-m N", whole(options.max_tokens, 1, most),
      "also the kernels of plans for any number of tokens up to N of the presets' layers");
  command.option(
      "--problem JSON", options.problems,
      "also the kernels of this problem, as fftune_plan_create takes it; may be repeated");
  command.option("-o,--out FILE", options.out, "the file to write");
  command.option("--jobs N", whole(options.jobs, 1, 1024),
                 "threads that compile (default: one a core)");
  add_progress_option(command, options.progress);
}

}  // namespace fftune::tool
