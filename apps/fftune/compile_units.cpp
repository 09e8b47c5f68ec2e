#include "apps/fftune/compile_units.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <variant>

#include "apps/fftune/problem_options.hpp"
#include "apps/fftune/values.hpp"
#include "registry/variant.hpp"

namespace fftune::tool {

namespace {

/// What the compiler sees of a program: kernels, and the launch shapes that it checks. Grids and
/// arguments are the problem's.
std::string compile_key(const Program& program) {
  std::string key;
  for (const KernelSource& kernel : program.kernels)
    key += kernel.file + ":" + kernel.expression + ";";
  for (const Step& step : program.steps)
    if (const auto* launch = std::get_if<KernelLaunch>(&step))
      key += fmt::format("{}:{}x{}x{},{}x{}x{},{};", launch->kernel, launch->block.x,
                         launch->block.y, launch->block.z, launch->cluster.x, launch->cluster.y,
                         launch->cluster.z, launch->shared_bytes);
  return key;
}

std::size_t dynamic_shared_bytes(const Program& program) {
  std::size_t bytes = 0;
  for (const Step& step : program.steps)
    if (const auto* launch = std::get_if<KernelLaunch>(&step))
      bytes = std::max<std::size_t>(bytes, launch->shared_bytes);
  return bytes;
}

class Units {
 public:
  void add(const std::string& family, const std::string& variant, const Problem& problem,
           Program program) {
    if (program.kernels.empty() || !seen_.insert(compile_key(program)).second) return;
    const std::size_t shared = dynamic_shared_bytes(program);
    units_.push_back({family, variant, problem.text(), std::move(program), shared});
  }

  /// First and last, and the rest evenly between them.
  std::vector<CompileUnit> take(std::size_t sample) {
    if (sample == 0 || units_.size() <= sample) return std::move(units_);
    std::vector<CompileUnit> chosen;
    for (std::size_t i = 0; i < sample; ++i)
      chosen.push_back(std::move(units_[sample == 1 ? 0 : i * (units_.size() - 1) / (sample - 1)]));
    return chosen;
  }

 private:
  std::set<std::string> seen_;
  std::vector<CompileUnit> units_;
};

/// The usual form of the pass, and each rare one by itself; with chosen options those alone.
std::vector<std::map<std::string, std::string>> forms_of(
    const Op& op, const std::string& pass, const std::map<std::string, std::string>& chosen) {
  std::vector<std::map<std::string, std::string>> forms{chosen};
  if (!chosen.empty()) return forms;
  for (const OptionField& field : options_of(op, pass))
    for (std::size_t i = 1; field.rare && i < field.choices.size(); ++i)
      forms.push_back({{field.name, field.choices[i]}});
  return forms;
}

/// Whether the form goes with the dtype: an option may be for some dtypes alone, or for where
/// another is given too.
bool goes_with(const Op& op, const std::string& pass, DType dtype,
               const std::map<std::string, std::string>& form) {
  Problem problem{std::string(op.name()), pass, dtype, {}, {}};
  for (const SizeField& field : op.sizes())
    if (!field.rare) problem.sizes[field.name] = field.example;
  for (const OptionField& field : options_of(op, pass))
    if (!field.rare) problem.options[field.name] = field.choices.front();
  for (const auto& [name, value] : form) problem.options[name] = value;
  return op.contradiction(problem).empty();
}

std::vector<Problem> example_problems(const Op& op, const ProblemOptions& chosen) {
  ProblemOptions options = chosen;
  std::vector<Problem> problems;
  for (const std::string& pass : op.passes())
    for (const auto& form : forms_of(op, pass, chosen.options)) {
      options.options = form;
      options.pass = pass;
      std::vector<std::string> dtypes;
      if (!chosen.dtypes.empty()) dtypes = parse_words(chosen.dtypes, "--dtype");
      for (const DType dtype : op.dtypes_of_pass(DeviceKind::cuda, pass)) {
        if (chosen.dtypes.empty()) dtypes.emplace_back(dtype_name(dtype));
        if (chosen.options.empty() && !goes_with(op, pass, dtype, form))
          std::erase(dtypes, dtype_name(dtype));
      }
      if (dtypes.empty()) continue;
      options.dtypes = fmt::format("{}", fmt::join(dtypes, ","));
      for (Problem& problem : problems_of(op, options, Sizes::optional, DeviceKind::cuda))
        problems.push_back(std::move(problem));
    }
  return problems;
}

}  // namespace

std::vector<CompileUnit> compile_units(const Op& op, const DeviceFacts& facts,
                                       const std::string& family, const ProblemOptions& chosen,
                                       std::size_t sample) {
  const std::vector<Problem> problems = example_problems(op, chosen);
  std::vector<CompileUnit> all;
  const auto take = [&](Units& units) {
    for (CompileUnit& unit : units.take(sample)) all.push_back(std::move(unit));
  };
  for (const Family* each : op.families()) {
    const std::string name(each->name());
    if (each->device_kind() != DeviceKind::cuda || (!family.empty() && name != family)) continue;
    Units units;
    for (const Problem& problem : problems) {
      if (each->refusal(problem, facts)) continue;
      for (const Config& config : each->space(problem, facts).feasible())
        units.add(name, Variant{name, config}.id(), problem, each->program(problem, facts, config));
    }
    take(units);
  }
  Units baselines;
  for (const Problem& problem : problems)
    if (family.empty())
      for (Baseline& baseline : op.baselines(problem, facts))
        baselines.add("baselines", baseline.name, problem, std::move(baseline.program));
  take(baselines);
  return all;
}

}  // namespace fftune::tool
