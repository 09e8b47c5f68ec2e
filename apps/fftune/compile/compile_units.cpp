#include "apps/fftune/compile/compile_units.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <variant>

#include "apps/fftune/command_line/problem_options.hpp"
#include "apps/fftune/command_line/values.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "registry/variant.hpp"

namespace fftune::tool {

namespace {

/// The parts of a program that the compiler sees: kernels, and the launch shapes that it checks.
/// Grids and arguments belong to the problem.
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

/// Programs that differ for the compiler.
class Units {
 public:
  /// False for a program that is one of them already, or has no kernel.
  bool add(const std::string& family, const std::string& variant, const Problem& problem,
           Program program) {
    if (program.kernels.empty() || !seen_.insert(compile_key(program)).second) return false;
    const std::size_t shared = dynamic_shared_bytes(program);
    units_.push_back({family, variant, problem.text(), std::move(program), shared});
    return true;
  }

  bool empty() const { return units_.empty(); }
  std::vector<CompileUnit> take() { return std::move(units_); }

 private:
  std::set<std::string> seen_;
  std::vector<CompileUnit> units_;
};

/// A variant of a family for a problem that it serves.
struct Candidate {
  const Problem* problem;
  Config config;
};

/// `sample` of `count` places, or all with 0: the first, the last, and the rest evenly between
/// them.
std::vector<std::size_t> sampled(std::size_t count, std::size_t sample) {
  const std::size_t places = sample == 0 ? count : std::min(sample, count);
  std::vector<std::size_t> chosen(places);
  for (std::size_t i = 0; i < places; ++i)
    chosen[i] = places == 1 ? 0 : i * (count - 1) / (places - 1);
  return chosen;
}

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

/// Every pass in every form and dtype that the op has together. Throws what is wrong with the first
/// if it has none.
std::vector<Problem> example_problems(const Op& op, const ProblemOptions& chosen) {
  std::vector<std::string> dtypes;
  for (const DType dtype : op.dtypes(DeviceKind::cuda)) dtypes.emplace_back(dtype_name(dtype));
  if (!chosen.dtypes.empty()) dtypes = parse_words(chosen.dtypes, "--dtype");
  std::vector<Problem> problems;
  std::optional<Error> refusal;
  for (const std::string& pass : op.passes())
    for (const auto& form : forms_of(op, pass, chosen.options))
      for (const std::string& dtype : dtypes) try {
          const ProblemOptions options{{chosen.sizes, form, dtype, pass}};
          for (Problem& problem : problems_of(op, options, Sizes::optional, DeviceKind::cuda))
            problems.push_back(std::move(problem));
        } catch (const Error& error) {
          if (error.kind() != ErrorKind::invalid_input) throw;
          if (!refusal) refusal = error;
        }
  if (problems.empty()) throw *refusal;
  return problems;
}

/// Those of the chosen options; none where these do not go together.
std::vector<Problem> problems_if_any(const Op& op, const ProblemOptions& chosen) {
  try {
    return example_problems(op, chosen);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::invalid_input) throw;
    return {};
  }
}

/// The same with rare sizes at their examples too, all of them and each by itself, for families
/// that serve nothing else.
std::vector<Problem> rare_problems(const Op& op, const ProblemOptions& chosen) {
  std::vector<ProblemOptions> forms{chosen};
  for (const SizeField& field : op.sizes()) {
    if (!field.rare) continue;
    const std::string example = std::to_string(field.example);
    forms.front().sizes.emplace(field.name, example);
    forms.push_back(chosen);
    forms.back().sizes.emplace(field.name, example);
  }
  std::vector<Problem> all;
  for (const ProblemOptions& form : forms)
    for (Problem& problem : problems_if_any(op, form)) all.push_back(std::move(problem));
  return all;
}

/// One token of every model that the op knows, for families that serve none of these.
std::vector<Problem> model_problems(const Op& op, const ProblemOptions& chosen) {
  std::vector<Problem> all;
  for (const KnownModel& model : op.known_models()) {
    ProblemOptions own = chosen;
    for (const auto& [name, value] : model.sizes) own.sizes.emplace(name, std::to_string(value));
    own.sizes.emplace(op.token_size(), "1");
    for (const auto& [name, value] : model.options) own.options.emplace(name, value);
    for (Problem& problem : problems_if_any(op, own)) all.push_back(std::move(problem));
  }
  return all;
}

/// One token of the examples with each rare option, and with each two of them together, for
/// families that serve none of these either.
std::vector<Problem> paired_problems(const Op& op, const ProblemOptions& chosen) {
  ProblemOptions one = chosen;
  one.sizes.emplace(op.token_size(), "1");
  std::vector<OptionField> rare = op.options();
  std::erase_if(rare, [&](const OptionField& field) {
    return !field.rare || field.choices.size() < 2 || chosen.options.contains(field.name);
  });
  std::vector<Problem> all = problems_if_any(op, one);
  for (std::size_t i = 0; i < rare.size(); ++i)
    for (std::size_t j = i; j < rare.size(); ++j) {
      ProblemOptions pair = one;
      for (const OptionField* field : {&rare[i], &rare[j]})
        pair.options.emplace(field->name, field->choices[1]);
      for (Problem& problem : problems_if_any(op, pair)) all.push_back(std::move(problem));
    }
  return all;
}

/// A family, its programs, and the problems whose programs are not among them yet.
struct FamilyUnits {
  const Family* family;
  Units units = {};
  std::vector<const Problem*> served = {};
};

}  // namespace

std::vector<CompileUnit> compile_units(const Op& op, const DeviceFacts& facts,
                                       const std::string& family, const ProblemOptions& chosen,
                                       std::size_t sample, const std::atomic<bool>& cancel) {
  const std::vector<Problem> problems = example_problems(op, chosen);
  const bool nested = has_nested_parts(op, problems.front());
  std::vector<CompileUnit> all;
  const auto take = [&](Units& units) {
    for (CompileUnit& unit : units.take()) all.push_back(std::move(unit));
  };
  std::vector<FamilyUnits> families;
  for (const Family* each : op.families()) {
    const std::string_view name = each->name();
    if (each->device_kind() != DeviceKind::cuda || (!family.empty() && name != family)) continue;
    // Families of parts, as layer.attention_decode, are compiled with these.
    if (family.empty() && nested && name.find('.') != std::string::npos) continue;
    families.push_back({each});
  }
  // Some families have 10⁵ variants, whose programs take gigabytes: those of the sample are made.
  const auto add = [&](FamilyUnits& own) {
    const Family& each = *own.family;
    std::vector<Candidate> candidates;
    for (const Problem* problem : own.served) {
      if (cancel) return;
      for (Config& config : each.space(*problem, facts).feasible())
        candidates.push_back({problem, std::move(config)});
    }
    const std::size_t count = candidates.size();
    std::vector<bool> tried(count);
    for (const std::size_t place : sampled(count, sample)) {
      // A program that is there already gives way to the next new one.
      bool added = false;
      for (std::size_t i = 0; !added && i < (sample == 0 ? 1 : count); ++i) {
        const std::size_t at = (place + i) % count;
        if (cancel) return;
        if (tried[at]) continue;
        tried[at] = true;
        const auto& [problem, config] = candidates[at];
        added =
            own.units.add(std::string(each.name()), Variant{std::string(each.name()), config}.id(),
                          *problem, each.program(*problem, facts, config));
      }
    }
  };
  // Asks the families that have no program yet about problems, at most `most` that each serves;
  // true if one still has none. A problem is asked of every family before the next: its parts,
  // which most families ask for, are then made once.
  const auto add_all = [&](const std::vector<Problem>& from, std::size_t most) {
    for (const Problem& problem : from)
      for (FamilyUnits& each : families)
        if (!cancel && each.units.empty() && each.served.size() < most &&
            !each.family->refusal(problem, facts))
          each.served.push_back(&problem);
    bool none = false;
    for (FamilyUnits& each : families) {
      if (each.units.empty()) add(each);
      each.served.clear();
      none = none || each.units.empty();
    }
    return none;
  };
  constexpr std::size_t any = std::numeric_limits<std::size_t>::max();
  if (add_all(problems, any) && !cancel && add_all(rare_problems(op, chosen), any) && !cancel &&
      add_all(model_problems(op, chosen), any) && !cancel)
    add_all(paired_problems(op, chosen), 1);
  for (FamilyUnits& each : families) take(each.units);
  std::vector<std::pair<const Problem*, Baseline>> served;
  for (const Problem& problem : problems)
    if (family.empty() && !cancel)
      for (Baseline& baseline : op.baselines(problem, facts))
        served.emplace_back(&problem, std::move(baseline));
  Units baselines;
  for (const std::size_t at : sampled(served.size(), sample))
    baselines.add("baselines", served[at].second.name, *served[at].first,
                  std::move(served[at].second.program));
  take(baselines);
  if (cancel) all.clear();
  return all;
}

namespace {

Json program_json(const std::string& arch, const CompileUnit& unit, const CompileReport& report) {
  Json kernels = Json::Array();
  for (const KernelReport& kernel : report.kernels)
    kernels.push_back({{"name", kernel.name},
                       {"registers", kernel.registers},
                       {"spill_bytes", kernel.spill_bytes},
                       {"static_shared_bytes", kernel.static_shared_bytes},
                       {"ptx_hash", kernel.ptx_hash},
                       {"warnings", kernel.warnings}});
  return {{"arch", arch},
          {"family", unit.family},
          {"variant", unit.variant},
          {"problem", unit.problem},
          {"dynamic_shared_bytes", unit.dynamic_shared_bytes},
          {"seconds", report.seconds},
          {"cached", report.cached},
          {"failure", report.failure},
          {"kernels", kernels}};
}

}  // namespace

CompileSummary::Row& CompileSummary::row(const std::string& arch, const std::string& family) {
  const auto found = std::find_if(rows_.begin(), rows_.end(), [&](const Row& each) {
    return each.arch == arch && each.family == family;
  });
  if (found != rows_.end()) return *found;
  rows_.push_back({});
  rows_.back().arch = arch;
  rows_.back().family = family;
  return rows_.back();
}

void CompileSummary::add(const std::string& arch, const std::vector<CompileUnit>& units,
                         const std::vector<UnitResult>& results) {
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (!results[i].tried) continue;
    const CompileUnit& unit = units[i];
    const CompileReport& report = results[i].report;
    Row& total = row(arch, unit.family);
    total.programs += 1;
    total.kernels += report.kernels.size();
    total.spilled += report.spill_bytes() > 0 ? 1 : 0;
    total.cached += report.cached ? 1 : 0;
    total.seconds += report.seconds;
    for (const KernelReport& kernel : report.kernels) {
      total.registers = std::max(total.registers, kernel.registers);
      total.shared_bytes =
          std::max(total.shared_bytes, unit.dynamic_shared_bytes +
                                           static_cast<std::size_t>(kernel.static_shared_bytes));
      for (const std::string& warning : kernel.warnings)
        warnings_.push_back(fmt::format("{} {}: {}", arch, unit.variant, warning));
    }
    if (!report.failure.empty()) {
      total.failed += 1;
      failed_.push_back(
          fmt::format("{} {} ({}): {}", arch, unit.variant, unit.problem, report.failure));
    }
    programs_.push_back(program_json(arch, unit, report));
  }
}

void CompileSummary::print(const Output& output) const {
  TextTable table({{"arch"},
                   {"family"},
                   {"programs", Align::right},
                   {"kernels", Align::right},
                   {"failed", Align::right},
                   {"spilled", Align::right},
                   {"registers", Align::right},
                   {"shared KiB", Align::right},
                   {"cached", Align::right},
                   {"seconds", Align::right}});
  for (const Row& each : rows_)
    table.row({each.arch,
               each.family,
               fmt::format("{}", each.programs),
               fmt::format("{}", each.kernels),
               {fmt::format("{}", each.failed), each.failed > 0 ? Style::bad : Style::plain},
               {fmt::format("{}", each.spilled), each.spilled > 0 ? Style::caution : Style::plain},
               fmt::format("{}", each.registers),
               fmt::format("{:.1f}", static_cast<double>(each.shared_bytes) / 1024),
               fmt::format("{}", each.cached),
               fmt::format("{:.1f}", each.seconds)});
  output.table(table);
  if (output.verbose())
    for (const std::string& warning : warnings_) output.line("warning: " + warning);
  for (const std::string& failure : failed_) output.line("failed: " + failure);
  output.document({{"failed", failed_.size()}, {"programs", programs_}});
}

}  // namespace fftune::tool
