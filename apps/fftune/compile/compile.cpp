// fftune compile: every variant for architectures that need not be here.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/progress_option.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/command_line/values.hpp"
#include "apps/fftune/commands.hpp"
#include "apps/fftune/compile/compile_units.hpp"
#include "apps/fftune/terminal/interrupt.hpp"
#include "apps/fftune/terminal/progress.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "core/parallel_until.hpp"
#include "cuda/open.hpp"
#include "tuning/log.hpp"

namespace fftune::tool {

namespace {

struct CompileOptions {
  std::vector<std::string> archs = known_architectures();
  std::vector<std::string> ops;  // empty: all
  std::string family;
  std::vector<std::string> dtypes;
  std::map<std::string, std::string> options;
  std::map<std::string, std::string> sizes;
  std::size_t sample = 0;  // 0: all
  int jobs = 0;            // 0: one a core
  std::string progress;
};

std::vector<const Op*> ops_named(const std::vector<std::string>& names, const Catalog& catalog) {
  if (names.empty()) return catalog.ops;
  std::vector<const Op*> ops;
  for (const std::string& name : names) ops.push_back(&catalog.op(name));
  return ops;
}

void check_family(const std::string& family, const std::vector<const Op*>& ops) {
  if (family.empty()) return;
  std::set<std::string> names;
  for (const Op* op : ops)
    for (const Family* each : op->families())
      if (each->device_kind() == DeviceKind::cuda) names.insert(std::string(each->name()));
  if (names.contains(family)) return;
  // Too many to list: those of one op are the answer.
  throw Error(ErrorKind::invalid_input,
              fmt::format("--family '{}' is unknown{}: fftune list OP names those of an op", family,
                          near_word(family, {names.begin(), names.end()})));
}

/// "act=gelu,save=preact" as names and values; the op says which there are. `example`: for errors.
Reader fields_reader(std::map<std::string, std::string>& fields, const char* example) {
  return {[&fields, example](const std::string& text, const std::string& where) {
    for (const std::string& word : parse_words(text, where)) {
      const std::size_t equals = word.find('=');
      if (equals == word.npos || equals == 0 || equals + 1 == word.size())
        throw Error(ErrorKind::invalid_input,
                    fmt::format("{} {}: write NAME=VALUE, as in {}", where, word, example));
      const std::string name = word.substr(0, equals);
      if (!fields.emplace(name, word.substr(equals + 1)).second)
        throw Error(ErrorKind::invalid_input,
                    fmt::format("{} {}: {} has a value already: give one", where, word, name));
    }
  }};
}

bool has_option(const Op& op, const std::string& name) {
  const auto fields = op.options();
  return std::any_of(fields.begin(), fields.end(),
                     [&](const OptionField& field) { return field.name == name; });
}

/// An option is one of every op that is compiled, as a program without it would not be what was
/// asked for.
void check_options(const std::map<std::string, std::string>& options,
                   const std::vector<const Op*>& ops) {
  std::set<std::string> known;
  for (const Op* op : ops)
    for (const OptionField& field : op->options()) known.insert(field.name);
  for (const auto& [name, value] : options) {
    check_choice(name, "--option", {known.begin(), known.end()});
    std::vector<std::string_view> having;
    for (const Op* op : ops)
      if (has_option(*op, name)) having.push_back(op->name());
    if (having.size() < ops.size())
      throw Error(ErrorKind::invalid_input,
                  fmt::format("--option {} is of {} alone: give them by --op", name,
                              fmt::join(having, ", ")));
  }
}

/// A size, too, is one of every op.
void check_size(const std::string& name, const std::vector<const Op*>& ops) {
  for (const Op* op : ops) {
    std::vector<std::string> known;
    for (const SizeField& field : op->sizes()) known.push_back(field.name);
    check_choice(name, fmt::format("--size of {}", op->name()), known);
  }
}

/// An element type is one of some op.
void check_dtypes(const std::vector<std::string>& dtypes, const std::vector<const Op*>& ops) {
  std::vector<std::string> known;
  for (const Op* op : ops)
    for (const DType dtype : op->dtypes(DeviceKind::cuda))
      if (std::find(known.begin(), known.end(), dtype_name(dtype)) == known.end())
        known.emplace_back(dtype_name(dtype));
  for (const std::string& word : dtypes) check_choice(word, "--dtype", known);
}

/// Those that the op has too, as a list.
std::string dtypes_of(const Op& op, std::vector<std::string> words) {
  const auto own = op.dtypes(DeviceKind::cuda);
  std::erase_if(words, [&](const std::string& word) {
    return std::none_of(own.begin(), own.end(),
                        [&](DType dtype) { return dtype_name(dtype) == word; });
  });
  return fmt::format("{}", fmt::join(words, ","));
}

/// More programs than these are announced, with the time that they take.
constexpr std::size_t few_programs = 200;

/// The units in the order in which they are compiled: `first` evenly spread ones, by which the time
/// of all is estimated, then the others.
std::vector<std::size_t> spread_first(std::size_t count, std::size_t first) {
  const std::size_t step = std::max<std::size_t>(count / std::max<std::size_t>(first, 1), 1);
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_partition(order.begin(), order.end(),
                        [&](std::size_t i) { return i % step == 0 && i / step < first; });
  return order;
}

/// Compiles on `jobs` threads; a unit that was not begun before an interrupt has no result.
std::vector<UnitResult> compile_all(Compiler& compiler, const std::vector<CompileUnit>& units,
                                    int jobs, const std::atomic<bool>& cancel,
                                    const std::string& what, StatusLine& status) {
  std::vector<UnitResult> results(units.size());
  std::atomic<std::size_t> failed{0}, done{0};
  const std::size_t probes = std::max<std::size_t>(16, 4 * static_cast<std::size_t>(jobs));
  const auto order = spread_first(units.size(), probes);
  const auto begun = std::chrono::steady_clock::now();
  ProgressBar progress(status, "compile " + what, units.size(), static_cast<double>(units.size()));
  parallel_until(units.size(), static_cast<std::size_t>(jobs), [&](std::size_t place) {
    if (cancel) return false;
    const std::size_t i = order[place];
    results[i] = {true, compiler.compile(units[i].program)};
    if (!results[i].report.failure.empty()) ++failed;
    progress.step(1, fmt::format("{}, {} failed", units[i].family, failed.load()));
    if (++done == probes && units.size() > few_programs) {
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begun;
      const auto left = static_cast<double>(units.size() - probes);
      logging::info("{}: about {} on {}, by the first {} programs", what,
                    seconds_text(spent.count() * left / static_cast<double>(probes)),
                    counted(static_cast<std::size_t>(jobs), "thread"), probes);
    }
    return true;
  });
  status.clear();
  return results;
}

int run(const CompileOptions& options, const Session& session) {
  const auto ops = ops_named(options.ops, session.catalog);
  check_family(options.family, ops);
  check_dtypes(options.dtypes, ops);
  check_options(options.options, ops);
  for (const auto& [name, value] : options.sizes) check_size(name, ops);
  ProblemOptions chosen{{options.sizes, options.options, {}, {}}};
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const int jobs = options.jobs > 0 ? options.jobs : cores;
  StatusLine status(progress_mode(options.progress, session.output));

  const Interrupt interrupt;
  const CudaOptions cuda{session.environment.cache_folder, session.environment.toolkit_folders};
  CompileSummary summary;
  for (const std::string& arch : options.archs) {
    const DeviceFacts facts = facts_of_architecture(arch);
    // Opened once there is something to compile: wrong words are told on every machine.
    std::unique_ptr<Compiler> compiler;
    for (const Op* op : ops) {
      chosen.dtypes = dtypes_of(*op, options.dtypes);
      if (chosen.dtypes.empty() && !options.dtypes.empty()) continue;
      const std::string what = fmt::format("{} {}", arch, op->name());
      std::vector<CompileUnit> units;
      {
        // Some ops have 10⁵ variants, and take ten seconds and more.
        ProgressBar progress(status, "compile " + what, 1, 1);
        progress.show_if_long("listing programs");
        units = compile_units(*op, facts, options.family, chosen, options.sample,
                              interrupt.requested());
      }
      status.clear();
      if (units.empty()) continue;
      if (!compiler) {
        compiler = make_cuda_compiler(arch, *session.catalog.sources, cuda);
        for (const std::string& warning : compiler->warnings()) logging::warn("{}", warning);
      }
      if (units.size() > few_programs)
        logging::info("{}: {} programs{}", what, units.size(),
                      options.sample > 0 ? "" : "; --sample 4 compiles 4 of each family instead");
      summary.add(arch, units,
                  compile_all(*compiler, units, jobs, interrupt.requested(), what, status));
      if (interrupt.requested()) break;
    }
    if (interrupt.requested()) break;
  }
  if (summary.programs() == 0 && !interrupt.requested())
    throw Error(ErrorKind::invalid_input,
                "no family has a program for all that was asked for: give fewer of --arch, "
                "--family, --dtype, --option and --size");
  summary.print(session.output);
  if (interrupt.requested()) return exit_interrupted;
  return summary.failures() == 0 ? exit_good : exit_check_failed;
}

}  // namespace

void add_compile(CommandLine& line) {
  auto [command, options] = line.add<CompileOptions>(
      line.root(), "compile",
      "compile every variant for architectures, no GPU needed: registers, spills, shared memory",
      run);
  Reader archs = words(options.archs, known_architectures());
  archs.initial = "all: " + archs.initial;
  command.option("--arch LIST", archs, "architectures, a list");
  command.option("--op LIST", words(options.ops, line.op_names()), "only these ops");
  command.option("--family NAME", options.family, "only this family");
  command.option("--dtype LIST", words(options.dtypes),
                 "only these element types; ops that have none of them are left out");
  command.option("--option LIST", fields_reader(options.options, "act=gelu"),
                 "with these options of the op alone, a list of NAME=VALUE (default: the usual "
                 "ones, and each rare one by itself)");
  command.option("--size LIST", fields_reader(options.sizes, "ranks=2"),
                 "with these sizes of the op, a list of NAME=VALUE (default: its examples)");
  command.option("--sample N", whole(options.sample, 1, 1 << 30),
                 "compile N programs of each family, evenly spread, instead of all");
  command.option("--jobs N", whole(options.jobs, 1, 1024),
                 "threads that compile (default: one a core)");
  add_progress_option(command, options.progress);
}

}  // namespace fftune::tool
