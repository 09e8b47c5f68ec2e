#include "apps/fftune/command_line/problem_options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <limits>
#include <set>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/values.hpp"
#include "core/distribution.hpp"
#include "core/error.hpp"

namespace fftune::tool {
namespace {

constexpr const char* group = "Problem";

bool has_default(const SizeField& field) {
  return !field.default_on_cuda.empty() || !field.default_on_cpu.empty();
}

std::vector<std::int64_t> values_of(const Op& op, const SizeField& field,
                                    const ProblemOptions& given, Sizes sizes, DeviceKind kind) {
  const auto text = given.sizes.find(field.name);
  const std::string where = "--" + field.name;
  if (text != given.sizes.end() && !text->second.empty()) {
    if (field.name != op.token_size()) return {parse_whole(text->second, where, 1, field.max)};
    return parse_whole_list(text->second, where, 1, field.max);
  }
  const auto& defaults = kind == DeviceKind::cpu ? field.default_on_cpu : field.default_on_cuda;
  if (!defaults.empty()) return defaults;
  if (sizes == Sizes::optional) return {field.example};
  throw Error(ErrorKind::invalid_input,
              fmt::format("{} needs {}, the {}: for example {} {}", op.name(), where, field.help,
                          where, field.example));
}

/// The given options, completed by the sizes of the named model, divided among devices.
ProblemOptions with_model(const Op& op, ProblemOptions given) {
  const auto models = op.known_models();
  if (!given.model.empty()) {
    std::vector<std::string> names;
    for (const KnownModel& model : models) names.push_back(model.name);
    check_choice(given.model, "--model", names);
    for (const KnownModel& model : models) {
      if (model.name != given.model) continue;
      for (const auto& [name, value] : model.sizes)
        if (given.sizes[name].empty()) given.sizes[name] = fmt::format("{}", value);
      // Packed gate and up are a weight each, however the model's dense ones lie.
      const std::string weights = given.options["weights"];
      const bool packed = !weights.empty() && weights != "dense";
      for (const auto& [name, value] : model.options)
        if (given.options[name].empty() && !(packed && name == "gate-up"))
          given.options[name] = value;
    }
  }
  if (given.tp.empty()) return given;
  const std::int64_t devices = parse_whole(given.tp, "--tp", 1, 1024);
  const auto sizes = op.sharded_sizes();
  if (std::all_of(sizes.begin(), sizes.end(),
                  [&](const std::string& size) { return given.sizes[size].empty(); }))
    throw Error(ErrorKind::invalid_input, fmt::format("--tp divides {}: give --{} or --model",
                                                      fmt::join(sizes, ", "), sizes.front()));
  for (const std::string& size : sizes) {
    std::string& text = given.sizes[size];
    if (text.empty()) continue;
    const std::int64_t whole = parse_whole(text, "--" + size, 1, 1 << 30);
    if (whole % devices != 0)
      throw Error(ErrorKind::invalid_input,
                  fmt::format("--tp {} does not divide {}={}", devices, size, whole));
    text = fmt::format("{}", whole / devices);
  }
  // Sums over the devices are a part of an op that counts them.
  for (const SizeField& field : op.sizes())
    if (field.name == "ranks" && given.sizes["ranks"].empty())
      given.sizes["ranks"] = fmt::format("{}", devices);
  return given;
}

std::vector<DType> dtypes_of(const Op& op, const std::string& pass, const std::string& given,
                             DeviceKind kind) {
  const auto all = op.dtypes_of_pass(kind, pass);
  if (given.empty()) return {all.at(0)};
  std::vector<DType> dtypes;
  std::vector<std::string> known;
  for (const DType dtype : all) known.emplace_back(dtype_name(dtype));
  const bool fewer = all.size() < op.dtypes(kind).size();
  const std::string what = fmt::format("--dtype{}{}", fewer ? " of pass " + pass : "",
                                       kind == DeviceKind::cpu ? " on the CPU" : "");
  for (const std::string& word : parse_words(given, "--dtype")) {
    check_choice(word, what, known);
    const DType dtype = parse_dtype(word);
    if (std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) dtypes.push_back(dtype);
  }
  return dtypes;
}

std::string size_help(const SizeField& field, bool tokens, Sizes sizes) {
  std::string help = field.help;
  if (tokens) help += "; a list such as 1,16,256";
  if (field.rare) return help;
  if (has_default(field))
    return help + fmt::format(" (default: {} on a GPU, {} on the CPU)",
                              fmt::join(field.default_on_cuda, ","),
                              fmt::join(field.default_on_cpu, ","));
  return help +
         (sizes == Sizes::required ? " (required)" : fmt::format(" (default: {})", field.example));
}

std::vector<std::string> dtype_names(const Op& op, DeviceKind kind) {
  std::vector<std::string> names;
  for (const DType dtype : op.dtypes(kind)) names.emplace_back(dtype_name(dtype));
  return names;
}

std::string spelled(std::string_view name, std::string_view type) {
  return fmt::format("--{} {}", name, type);
}

}  // namespace

void add_problem_options(Command& command, const Op& op, Sizes sizes, ProblemOptions& values) {
  // The pass and the types come first: they decide which other options there are.
  command.option("--pass WORD", values.pass,
                 fmt::format("{} (default: {})", fmt::join(op.passes(), ", "), op.passes().at(0)),
                 group);
  command.option("--dtype LIST", values.dtypes,
                 fmt::format("element types, a list (GPU: {}; CPU: {}; default: the first)",
                             fmt::join(dtype_names(op, DeviceKind::cuda), ", "),
                             fmt::join(dtype_names(op, DeviceKind::cpu), ", ")),
                 group);
  for (const SizeField& field : op.sizes()) {
    const bool tokens = field.name == op.token_size();
    command.option(spelled(field.name, tokens ? "LIST" : "N"), values.sizes[field.name],
                   size_help(field, tokens, sizes), group);
  }
  if (const auto models = op.known_models(); !models.empty()) {
    std::vector<std::string> names;
    for (const KnownModel& model : models) names.push_back(model.name);
    command.option("--model NAME", values.model,
                   fmt::format("the sizes and options of a model that are not given: {}",
                               fmt::join(names, ", ")),
                   group);
  }
  if (const auto sharded = op.sharded_sizes(); !sharded.empty())
    command.option("--tp N", values.tp,
                   fmt::format("devices that share a layer, each with a part of {} (default: 1)",
                               fmt::join(sharded, ", ")),
                   group);
  for (const OptionField& field : op.options()) {
    const std::string meaning =
        fmt::format("{}: {} (default: {})", field.help, choices_text(field), field.choices.at(0));
    // The same option of another pass is one word of the command line with two meanings.
    if (Option* const known = command.find("--" + field.name)) {
      known->help += fmt::format(". Pass {}: {}", field.pass, meaning);
      continue;
    }
    const std::string help =
        field.pass.empty() ? meaning : fmt::format("pass {}: {}", field.pass, meaning);
    const char* const type = field.number      ? "NUMBER"
                             : field.pattern   ? "PATTERN"
                             : field.routing   ? "ROUTING"
                             : field.is_text() ? "TEXT"
                                               : "WORD";
    command.option(spelled(field.name, type), values.options[field.name], help, group);
  }
}

namespace {

/// A routing's file is read once before any work is done. Throws for an error in it.
void require_ids(const Problem& problem, const std::string& text) {
  const auto routing = parse_routing(text);
  if (!routing || routing->file.empty()) return;
  if (std::any_of(routing->file.begin(), routing->file.end(),
                  [](unsigned char c) { return std::iscntrl(c) != 0; }))
    throw Error(ErrorKind::invalid_input,
                "the name of a routing's file has a control character, which no preset may have: "
                "rename it");
  const auto experts = problem.sizes.find("experts"), choices = problem.sizes.find("top-k");
  if (experts == problem.sizes.end() || choices == problem.sizes.end()) return;
  if (choices->second <= experts->second)
    draw_routing(*routing, 1, experts->second, choices->second, 0);
}

}  // namespace

std::vector<Problem> problems_of(const Op& op, const ProblemOptions& given_values, Sizes sizes,
                                 DeviceKind kind) {
  const ProblemOptions values = with_model(op, given_values);
  Problem base;
  base.op = op.name();
  base.pass = values.pass.empty() ? op.passes().at(0) : values.pass;
  check_choice(base.pass, "--pass", op.passes());
  for (const auto& [name, given] : values.options)
    if (!given.empty()) base.options[name] = given;  // canonical() knows which the pass has
  for (const OptionField& field : options_of(op, base.pass)) {
    const auto given = values.options.find(field.name);
    const bool absent = given == values.options.end() || given->second.empty();
    base.options[field.name] = absent ? field.choices.at(0) : given->second;
    if (field.has_choices())
      check_choice(base.options[field.name], "--" + field.name, field.choices);
  }
  // A plan would find no group's memory. Listings and `compile` need none.
  if (sizes == Sizes::required && needs_group(base))
    throw Error(ErrorKind::invalid_input,
                fmt::format("--link {}; or use --link loopback here", needs_group_words(base)));
  std::vector<std::int64_t> tokens;
  for (const SizeField& field : op.sizes()) {
    const auto text = values.sizes.find(field.name);
    const bool absent = text == values.sizes.end() || text->second.empty();
    if (absent && !needs_size(field, base)) continue;
    const auto given = values_of(op, field, values, sizes, kind);
    base.sizes[field.name] = given.at(0);
    if (field.name == op.token_size()) tokens = given;
  }
  for (const OptionField& field : options_of(op, base.pass))
    if (field.routing) require_ids(base, base.options[field.name]);
  std::vector<Problem> problems;
  for (const DType dtype : dtypes_of(op, base.pass, values.dtypes, kind)) {
    base.dtype = dtype;
    for (const std::int64_t count : tokens)
      problems.push_back(canonical(op, base.with_size(op.token_size(), count), kind));
  }
  return problems;
}

std::string fault_of_recorded(const Op& op, const Problem& problem, DeviceKind kind) {
  try {
    // Records may state what leaving a size out means: lookups do not tell them apart.
    return canonical(op, problem, kind) == without_defaults(op.sizes(), op.token_size(), problem)
               ? ""
               : "its problem lacks fields of its op: search anew";
  } catch (const Error& error) {
    return error.what();
  }
}

bool needs_group(const Problem& problem) {
  return problem.has("link", "peers") || problem.has("link", "nccl");
}

std::string needs_group_words(const Problem& problem) {
  return problem.option("link") + " needs the ranks of a group, and the tool is one process: " +
         (problem.has("link", "nccl") ? "NCCL has no variants to search"
                                      : "search on all ranks with fftune.distributed.Group.tune or "
                                        "fftune_group_tune_with, which write presets too");
}

Problem on_one_rank(const Op& op, Problem problem, DeviceKind kind) {
  if (!needs_group(problem)) return problem;
  problem.options["link"] = "loopback";
  return canonical(op, std::move(problem), kind);
}

Problem example_problem(const Op& op, const std::string& pass, DType dtype, DeviceKind kind) {
  ProblemOptions values;
  values.pass = pass;
  values.dtypes = dtype_name(dtype);
  return problems_of(op, values, Sizes::optional, kind).at(0);
}

void add_problem_filter(Command& command, const std::vector<const Op*>& ops,
                        ProblemFilter& values) {
  const char* filters = "Which problems";
  std::vector<std::string> known;
  for (const Op* op : ops) known.emplace_back(op->name());
  command.option("--op LIST", words(values.ops, known), "only these ops", filters);
  const auto read_dtypes = [&](const std::string& text, const std::string& where) {
    values.dtypes = parse_words(text, where);
    for (const std::string& word : values.dtypes) parse_dtype(word);
  };
  command.option("--dtype LIST", Reader{read_dtypes}, "only these element types", filters);
  std::set<std::string> added;
  for (const Op* op : ops)
    for (const SizeField& field : op->sizes())
      if (added.insert(field.name).second)
        command.option(
            spelled(field.name, "LIST"),
            whole_list(values.sizes[field.name], 1, std::numeric_limits<std::int32_t>::max()),
            "only these sizes: " + field.help, filters);
}

bool admits(const ProblemFilter& filter, const Problem& problem) {
  const auto admitted = [](const auto& list, const auto& value) {
    return list.empty() || std::find(list.begin(), list.end(), value) != list.end();
  };
  return admitted(filter.ops, problem.op) && admitted(filter.dtypes, dtype_name(problem.dtype)) &&
         std::all_of(filter.sizes.begin(), filter.sizes.end(), [&](const auto& named) {
           const auto size = problem.sizes.find(named.first);
           return named.second.empty() ||
                  (size != problem.sizes.end() && admitted(named.second, size->second));
         });
}

}  // namespace fftune::tool
