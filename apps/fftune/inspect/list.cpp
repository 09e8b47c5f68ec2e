// fftune list OP: its families here, their parameters and feasible variants, and why others are
// out.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/device_option.hpp"
#include "apps/fftune/command_line/problem_options.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/command_line/values.hpp"
#include "apps/fftune/commands.hpp"
#include "apps/fftune/terminal/json.hpp"
#include "core/error.hpp"
#include "core/space.hpp"
#include "registry/family.hpp"
#include "tuning/journal/quarantine.hpp"

namespace fftune::tool {

struct ConstraintEffect {
  std::string reason;
  std::size_t alone = 0;  // configurations that this constraint alone rules out
};

struct FamilyView {
  const Family* family = nullptr;
  std::string refusal;  // why none of it can serve; then all below is empty
  std::vector<Parameter> parameters;
  std::size_t size = 0;  // before the constraints
  std::vector<Config> feasible;
  Config untuned;
  std::vector<ConstraintEffect> effects;  // only if asked for
};

FamilyView view_of(const Family& family, const Problem& problem, const DeviceFacts& facts,
                   bool with_effects);

namespace {

// The space with one constraint left out.
Space without(const Space& space, std::size_t left_out) {
  Space other;
  for (const Parameter& parameter : space.parameters()) other.parameter(parameter);
  for (std::size_t i = 0; i < space.constraints().size(); ++i) {
    const Constraint& constraint = space.constraints()[i];
    if (i != left_out) other.constraint(constraint.reason, constraint.holds, constraint.reads);
  }
  return other;
}

}  // namespace

FamilyView view_of(const Family& family, const Problem& problem, const DeviceFacts& facts,
                   bool with_effects) {
  FamilyView view;
  view.family = &family;
  if (const auto refusal = family.refusal(problem, facts)) {
    view.refusal = *refusal;
    return view;
  }
  const Space space = family.space(problem, facts);
  view.parameters = space.parameters();
  view.size = space.size();
  view.feasible = space.feasible();
  view.untuned = family.default_config(problem, facts);
  // A configuration that breaks this constraint and no other is feasible without it: counting
  // those needs no walk over the whole product of the parameters.
  for (std::size_t i = 0; with_effects && i < space.constraints().size(); ++i)
    view.effects.push_back({space.constraints()[i].reason,
                            without(space, i).feasible().size() - view.feasible.size()});
  return view;
}

namespace {

struct ListOptions {
  ProblemOptions problem;
  std::string device;
  std::string arch;
  bool explain = false;
  bool variants = false;
};

struct Section {
  Problem problem;
  std::vector<FamilyView> families;
};

/// The op's variants that are quarantined on the device, for the present sources.
std::vector<Quarantined> quarantined_of(const Op& op, const DeviceFacts& facts,
                                        const Session& session) {
  auto all = Quarantine(session.environment.state_folder, facts).of(std::string(op.name()));
  std::erase_if(all, [&](const Quarantined& entry) {
    for (const Family* family : op.families())
      if (entry.id.starts_with(std::string(family->name()) + "/"))
        return session.catalog.sources->hash(family->sources()) != entry.source_hash;
    return true;
  });
  return all;
}

void print_quarantined(const std::vector<Quarantined>& all, const Output& output) {
  if (all.empty()) return;
  output.line("");
  output.heading("quarantined: not run unless --retry-quarantined is given");
  TextTable table({{"since"}, {"problem"}, {"variant"}, {"cause"}});
  for (const Quarantined& entry : all)
    table.row({entry.date, entry.problem, entry.id, entry.cause});
  output.table(table);
}

Json quarantined_json(const std::vector<Quarantined>& all) {
  Json json = Json::Array();
  for (const Quarantined& entry : all)
    json.push_back({{"problem", entry.problem},
                    {"variant", entry.id},
                    {"cause", entry.cause},
                    {"date", entry.date}});
  return json;
}

/// The architectures whose typical devices the family serves; none for a CPU's family.
std::vector<std::string> architectures_of(const Family& family, const Problem& problem) {
  std::vector<std::string> served;
  if (family.device_kind() != DeviceKind::cuda) return served;
  for (const std::string& arch : known_architectures())
    if (!family.refusal(problem, facts_of_architecture(arch))) served.push_back(arch);
  return served;
}

Json section_json(const Section& section) {
  Json json = {{"problem", to_json(section.problem)}, {"families", Json::Array()}};
  for (const FamilyView& view : section.families) {
    Json family = {{"family", view.family->name()},
                   {"summary", view.family->summary()},
                   {"stages", view.family->stages()},
                   {"fallback", view.family->is_fallback()},
                   {"refusal", view.refusal},
                   {"configurations", view.size},
                   {"feasible", view.feasible.size()},
                   {"architectures", architectures_of(*view.family, section.problem)}};
    for (const Parameter& parameter : view.parameters) {
      Json values = Json::Array();
      for (const ParameterValue& value : parameter.values) values.push_back(to_json(value));
      family["parameters"].push_back(
          {{"name", parameter.name}, {"help", parameter.help}, {"values", std::move(values)}});
    }
    for (const ConstraintEffect& effect : view.effects)
      family["constraints"].push_back(
          {{"reason", effect.reason}, {"alone_rules_out", effect.alone}});
    if (view.refusal.empty())
      family["untuned"] = Variant{std::string(view.family->name()), view.untuned}.id();
    family["variants"] = Json::Array();
    for (const Config& config : view.feasible)
      family["variants"].push_back(Variant{std::string(view.family->name()), config}.id());
    json["families"].push_back(family);
  }
  return json;
}

/// Whether it is for a stage of the problem: an op's families are those of all its passes.
bool is_for(const Family& family, const std::vector<StageSpec>& stages) {
  return std::any_of(stages.begin(), stages.end(),
                     [&](const StageSpec& stage) { return stage.name == family.stages().front(); });
}

/// Prints the families that can run; --explain prints the others.
void print_families(const Op& op, const std::vector<Section>& sections, const Output& output) {
  const std::string tokens(op.token_size());
  std::set<std::string_view> refused, served;
  TextTable table({{"dtype"},
                   {tokens, Align::right},
                   {"family"},
                   {"stages"},
                   {"feasible", Align::right},
                   {"of", Align::right},
                   {"untuned"}});
  for (const Section& section : sections) {
    const auto stages = op.stages(section.problem);
    for (const FamilyView& view : section.families) {
      if (!view.refusal.empty()) {
        if (is_for(*view.family, stages)) refused.insert(view.family->name());
        continue;
      }
      served.insert(view.family->name());
      table.row({std::string(dtype_name(section.problem.dtype)),
                 fmt::format("{}", section.problem.size(tokens)), std::string(view.family->name()),
                 fmt::format("{}", fmt::join(view.family->stages(), "+")),
                 fmt::format("{}", view.feasible.size()), fmt::format("{}", view.size),
                 view.untuned.text()});
    }
  }
  if (!table.empty()) output.table(table);
  for (const std::string_view name : served) refused.erase(name);
  if (!refused.empty())
    output.line(fmt::format(
        "refused here: {} ({}); --explain says why",
        refused.size() == 1 ? std::string("1 family") : fmt::format("{} families", refused.size()),
        fmt::join(refused, ", ")));
}

/// Each CUDA family with the architectures that it serves in any of the problems.
void print_architectures(const Op& op, const std::vector<Section>& sections, const Output& output) {
  TextTable table({{"family"}, {"architectures"}});
  for (const Family* family : op.families()) {
    std::set<std::string> served;
    for (const Section& section : sections)
      for (const std::string& arch : architectures_of(*family, section.problem))
        served.insert(arch);
    std::vector<std::string> in_order = known_architectures();
    std::erase_if(in_order, [&](const std::string& arch) { return !served.contains(arch); });
    if (!in_order.empty())
      table.row({std::string(family->name()), fmt::format("{}", fmt::join(in_order, ", "))});
  }
  if (table.empty()) return;
  output.line("");
  output.table(table);
}

// The parameters of each family where it first serves; values may differ from problem to problem.
void print_parameters(const std::vector<Section>& sections, const Output& output) {
  TextTable table({{"family"}, {"parameter"}, {"values"}, {"meaning"}});
  std::set<const Family*> done;
  for (const Section& section : sections)
    for (const FamilyView& view : section.families) {
      if (!view.refusal.empty() || !done.insert(view.family).second) continue;
      for (const Parameter& parameter : view.parameters)
        table.row({std::string(view.family->name()), parameter.name, parameter.values_text(","),
                   parameter.help});
    }
  if (table.empty()) return;
  output.line("");
  output.table(table);
}

void print_effects(const Section& section, const Output& output) {
  output.line("");
  output.heading(section.problem.text());
  for (const FamilyView& view : section.families) {
    if (!view.refusal.empty()) continue;
    output.line(fmt::format("{}: {} of {} configurations are feasible", view.family->name(),
                            view.feasible.size(), view.size));
    if (view.effects.empty()) continue;
    TextTable table({{"rules out alone", Align::right}, {"constraint"}});
    for (const ConstraintEffect& effect : view.effects)
      table.row({fmt::format("{}", effect.alone), effect.reason});
    output.table(table);
  }
}

/// Each reason once, with the families that give it, and the problems where not in all of them.
/// Families without a stage here, such as those of the other pass, are one line.
void print_refusals(const Op& op, const std::vector<Section>& sections, const Output& output) {
  using Refusal = std::pair<std::string, std::string>;  // reason, problems
  std::vector<std::pair<Refusal, std::vector<std::string_view>>> refusals;
  std::vector<std::string_view> elsewhere;
  const std::string tokens(op.token_size());
  for (const Family* family : op.families()) {
    std::map<std::string, std::vector<std::string>> problems;  // by reason
    bool has_stage = false;
    for (const Section& section : sections)
      for (const FamilyView& view : section.families)
        if (view.family == family && !view.refusal.empty()) {
          problems[view.refusal].push_back(fmt::format(
              "{} {}={}", dtype_name(section.problem.dtype), tokens, section.problem.size(tokens)));
          has_stage = has_stage || is_for(*family, op.stages(section.problem));
        }
    if (!problems.empty() && !has_stage) {
      elsewhere.push_back(family->name());
      continue;
    }
    for (const auto& [reason, where] : problems) {
      const Refusal refusal{
          reason, where.size() < sections.size() ? fmt::format("{}", fmt::join(where, ", ")) : ""};
      auto found = std::find_if(refusals.begin(), refusals.end(),
                                [&](const auto& each) { return each.first == refusal; });
      if (found == refusals.end()) found = refusals.insert(found, {refusal, {}});
      found->second.push_back(family->name());
    }
  }
  output.line("");
  for (const auto& [refusal, families] : refusals)
    output.line(fmt::format("refused: {}{}: {}", fmt::join(families, ", "),
                            refusal.second.empty() ? "" : " (" + refusal.second + ")",
                            refusal.first));
  if (!elsewhere.empty())
    output.line(fmt::format("of other passes or options: {}", fmt::join(elsewhere, ", ")));
}

void print_variants(const Section& section, const Output& output) {
  output.line("");
  output.heading(section.problem.text());
  for (const FamilyView& view : section.families)
    for (const Config& config : view.feasible)
      output.line(Variant{std::string(view.family->name()), config}.id());
}

int run(const Op& op, ListOptions& options, const Session& session) {
  if (!options.arch.empty() && !options.device.empty())
    throw Error(ErrorKind::invalid_input,
                "--arch and --device exclude each other: give the one to list for");
  const std::string device =
      options.arch.empty() ? device_named(options.device, session.environment) : "";
  const DeviceFacts facts = options.arch.empty() ? facts_of_device(device, session.environment)
                                                 : facts_of_architecture(options.arch);
  std::vector<Section> sections;
  for (const Problem& problem : problems_of(op, options.problem, Sizes::optional, facts.kind)) {
    Section section{problem, {}};
    for (const Family* family : op.families())
      if (family->device_kind() == facts.kind)
        section.families.push_back(view_of(*family, problem, facts, options.explain));
    // Families that can run come first.
    std::stable_partition(section.families.begin(), section.families.end(),
                          [](const FamilyView& view) { return view.refusal.empty(); });
    sections.push_back(std::move(section));
  }

  const Output& output = session.output;
  output.heading(fmt::format("{} on {} ({})", op.name(), facts.name, facts.arch));
  print_families(op, sections, output);
  if (facts.kind == DeviceKind::cuda) print_architectures(op, sections, output);
  print_parameters(sections, output);
  Json document = {{"op", op.name()}, {"device", to_json(facts)}, {"problems", Json::Array()}};
  for (const Section& section : sections) {
    if (options.explain) print_effects(section, output);
    if (options.variants) print_variants(section, output);
    document["problems"].push_back(section_json(section));
  }
  if (options.explain) print_refusals(op, sections, output);
  // An architecture is no device: nothing has run on it.
  if (options.explain && options.arch.empty()) {
    const auto quarantined = quarantined_of(op, facts, session);
    print_quarantined(quarantined, output);
    document["quarantined"] = quarantined_json(quarantined);
  }
  output.document(document);
  return exit_good;
}

}  // namespace

void add_list(CommandLine& line) {
  Command& group = line.add_group(line.root(), "list",
                                  "an op's families, parameters and feasible variants on a device");
  for (const Op* op : line.catalog().ops) {
    auto [command, options] = line.add<ListOptions>(group, *op, run);
    add_problem_options(command, *op, Sizes::optional, options.problem);
    add_device_option(command, options.device, false);
    command.option("--arch NAME", choice(options.arch, known_architectures()),
                   fmt::format("instead of a device, a typical one of an architecture: {}",
                               fmt::join(known_architectures(), ", ")));
    command.flag("--explain", options.explain,
                 "why families are refused; for each constraint its reason, and how many "
                 "configurations it alone rules out; and which variants are quarantined on the "
                 "device, and why");
    command.flag("--variants", options.variants, "the id of every feasible variant");
  }
}

}  // namespace fftune::tool
