// Every kernel in the embedded sources is launched by some variant for some problem, and compiles:
// what defaults and samples of variants launch says nothing about the other kernels.
#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/error.hpp"
#include "cuda/open.hpp"
#include "families/small_problems.hpp"
#include "registry/catalog.hpp"
#include "registry/part_family.hpp"
#include "runtime/environment.hpp"
#include "support/catch.hpp"
#include "verify/host_threads.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

using NamedSizes = std::map<std::string, std::int64_t>;

/// The names of the __global__ functions that a source defines.
std::vector<std::string> defined_kernels(std::string_view source) {
  static const std::set<std::string_view> attributes{"__launch_bounds__", "__cluster_dims__",
                                                     "__block_size__", "__maxnreg__"};
  std::vector<std::string> names;
  const Tokens tokens = tokens_of(source);
  for (auto token = tokens.begin(); token != tokens.end(); ++token) {
    if (token->text != "__global__") continue;
    int depth = 0;  // of parentheses
    for (; token != tokens.end(); ++token) {
      if (token->text == ")") --depth;
      if (token->text != "(") continue;
      if (depth++ > 0 || attributes.contains(std::prev(token)->text)) continue;
      names.emplace_back(std::prev(token)->text);
      break;
    }
  }
  return names;
}

/// A __global__ function: the source that defines it, and its name.
using DefinedKernel = std::pair<std::string, std::string>;

struct KnownLaunch {
  KernelSource source;
  std::string arch;
  std::string by;        // problem and variant
  std::size_t cost = 0;  // grows with tiles, and so with the time that the compiler takes
};

/// All kernels of a set of sources, each with the cheapest launch of those that were added.
class KernelLaunches {
 public:
  explicit KernelLaunches(const SourceSet& sources) : sources_(sources) {
    for (const std::string& file : sources.names())
      if (file.ends_with(".cu") || file.ends_with(".cuh"))
        for (const std::string& name : defined_kernels(sources.text(file)))
          files_[name].push_back(file);
  }

  const std::map<DefinedKernel, KnownLaunch>& cheapest() const { return cheapest_; }

  std::vector<DefinedKernel> missing() const {
    std::vector<DefinedKernel> kernels;
    for (const auto& [name, files] : files_)
      for (const std::string& file : files)
        if (!cheapest_.contains({file, name})) kernels.emplace_back(file, name);
    return kernels;
  }

  /// Launches on another architecture count where there is none on the first one.
  void add(const Program& program, const std::string& arch, const std::string& by) {
    for (const Step& step : program.steps) {
      const auto* const launch = std::get_if<KernelLaunch>(&step);
      if (!launch) continue;
      const KernelSource& source = program.kernels[launch->kernel];
      const std::size_t cost = launch->shared_bytes + source.expression.size();
      const auto [known, fresh] = cheapest_.try_emplace(kernel_of(source));
      if (fresh || (known->second.arch == arch && cost < known->second.cost))
        known->second = {source, arch, by, cost};
    }
  }

 private:
  DefinedKernel kernel_of(const KernelSource& source) {
    std::string name = source.expression.substr(0, source.expression.find('<'));
    if (const auto colons = name.rfind("::"); colons != name.npos) name.erase(0, colons + 2);
    const auto [known, fresh] = definitions_.try_emplace({source.file, name});
    if (fresh) {
      CAPTURE(source.file, source.expression);
      REQUIRE(files_.contains(name));
      const auto closure = sources_.closure(source.file);
      for (const std::string& file : files_.at(name))
        if (std::find(closure.begin(), closure.end(), file) != closure.end()) known->second = file;
      REQUIRE(known->second != "");
    }
    return {known->second, name};
  }

  const SourceSet& sources_;
  std::map<std::string, std::vector<std::string>> files_;  // by the name of what they define
  std::map<std::pair<std::string, std::string>, std::string> definitions_;
  std::map<DefinedKernel, KnownLaunch> cheapest_;
};

Problem with_sizes(Problem problem, const NamedSizes& sizes) {
  for (const auto& [name, value] : sizes) problem.sizes[name] = value;
  return problem;
}

/// Problems whose kernels no example, model, or single option or size has.
std::vector<Problem> rare_problems(const Op& op) {
  static const std::map<std::string_view, std::vector<std::pair<NamedSizes, Options>>> rare{
      {"attention",
       {// Chunks of keys that CTAs divide.
        {{{"b", 1}, {"s", 4}, {"kv", 8192}, {"dim", 64}}, {{"batch-invariant", "yes"}}},
        // Rows of heads that TMA cannot load.
        {{{"b", 2}, {"s", 128}, {"dim", 20}}, {}},
        {{{"b", 2}, {"s", 3}, {"page", 16}, {"dim", 20}, {"v-dim", 24}},
         {{"cache-format", "e4m3"}}}}},
      {"qkv", {{{{"m", 5}}, {{"cache", "yes"}, {"cache-format", "e4m3"}}}}}};
  std::vector<Problem> problems;
  if (const auto found = rare.find(op.name()); found != rare.end())
    for (const auto& [sizes, options] : found->second)
      problems.push_back(
          with_sizes(example_problem(op, op.passes().front(), DType::bf16, options), sizes));
  return problems;
}

/// Examples of each form and with each rare size, and models, at a few numbers of tokens; and the
/// small problems of each family.
std::vector<Problem> many_problems(const Op& op, const DeviceFacts& facts) {
  std::vector<Problem> problems;
  const auto add = [&](const Problem& problem) {
    try {
      problems.push_back(unrepeated(op, canonical(op, problem, facts.kind)));
    } catch (const Error&) {  // fields that do not go together
    }
  };
  const auto add_at_tokens = [&](const Problem& problem) {
    for (const std::int64_t tokens : {1, 33, 512, 4096})
      add(with_sizes(problem, {{std::string(op.token_size()), tokens}}));
  };
  for (const Problem& problem : rare_problems(op)) add(problem);
  const bool nested = is_nested(op);
  for (const std::string& pass : op.passes())
    for (const DType dtype : op.dtypes_of_pass(facts.kind, pass)) {
      for (const Options& form : forms_of(op, pass)) {
        if (nested && !form.empty()) continue;
        add_at_tokens(example_problem(op, pass, dtype, form));
        for (const Family* family : op.families())
          if (family->device_kind() == facts.kind)
            if (const auto small = small_problem(op, *family, pass, dtype, form, facts))
              problems.push_back(*small);
      }
      const Problem example = example_problem(op, pass, dtype);
      for (const SizeField& size : op.sizes())
        for (const std::int64_t value : {std::int64_t{2}, std::int64_t{48}, size.example})
          if (size.rare) add_at_tokens(with_sizes(example, {{size.name, value}}));
      for (const KnownModel& model : op.known_models())
        add_at_tokens(with_sizes(example_problem(op, pass, dtype, model.options), model.sizes));
    }
  return problems;
}

/// The default, and those that differ from it in one parameter.
std::vector<Config> near_default(const Family& family, const Problem& problem,
                                 const DeviceFacts& facts) {
  const Config usual = family.default_config(problem, facts);
  const Space space = family.space(problem, facts);
  std::vector<Config> configs{usual};
  for (const Parameter& parameter : space.parameters())
    for (const ParameterValue& value : parameter.values) {
      Config config = usual;
      config.set(parameter.name, value);
      if (config != usual && space.violations(config).empty()) configs.push_back(config);
    }
  return configs;
}

/// Adds what the op's variants and baselines launch; those of a part are its own op's.
void add_launches(const Op& op, const DeviceFacts& facts, KernelLaunches& launches) {
  for (const Problem& problem : many_problems(op, facts)) {
    for (const Family* family : op.families()) {
      if (family->device_kind() != facts.kind || dynamic_cast<const PartFamily*>(family) ||
          family->refusal(problem, facts))
        continue;
      // Spaces of whole layers are large.
      const auto configs = op.parts(problem).empty()
                               ? near_default(*family, problem, facts)
                               : std::vector{family->default_config(problem, facts)};
      for (const Config& config : configs)
        launches.add(family->program(problem, facts, config), facts.arch,
                     problem.text() + " " + Variant{std::string(family->name()), config}.id());
    }
    for (const Baseline& baseline : op.baselines(problem, facts))
      launches.add(baseline.program, facts.arch, problem.text() + " " + baseline.name);
  }
}

/// Compiles the kernels; returns what failed of each. Throws Error(unavailable) without NVRTC.
std::vector<std::string> failures_of(const std::vector<KnownLaunch>& launches) {
  const Environment environment = read_environment();
  std::map<std::string, std::unique_ptr<Compiler>> compilers;
  for (const KnownLaunch& launch : launches)
    if (auto& compiler = compilers[launch.arch]; !compiler)
      compiler = make_cuda_compiler(launch.arch, *builtin_catalog().sources,
                                    {environment.cache_folder, environment.toolkit_folders});
  std::vector<std::string> failures(launches.size());
  HostThreads threads;
  threads.run(static_cast<int>(launches.size()), threads.max_threads(), [&](int i) {
    const auto index = static_cast<std::size_t>(i);
    Program program;
    program.kernels = {launches[index].source};
    failures[index] = compilers.at(launches[index].arch)->compile(program).failure;
  });
  return failures;
}

}  // namespace

TEST_CASE("every kernel is launched by some variant, and compiles") {
  KernelLaunches launches(*builtin_catalog().sources);
  for (const char* arch : {"sm_90a", "sm_80"}) {
    if (launches.missing().empty()) break;
    for (const Op* op : builtin_catalog().ops)
      add_launches(*op, facts_of_architecture(arch), launches);
  }
  for (const auto& [file, name] : launches.missing())
    FAIL_CHECK("no variant launches " << name << " of " << file);

  std::vector<KnownLaunch> all;
  for (const auto& [kernel, launch] : launches.cheapest()) all.push_back(launch);
  REQUIRE(all.size() > 100);
  std::vector<std::string> failures;
  try {
    failures = failures_of(all);
  } catch (const Error& error) {
    FFTUNE_SKIP(error.what());
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    CAPTURE(all[i].source.file, all[i].source.expression, all[i].by);
    CHECK(failures[i] == "");
  }
}
