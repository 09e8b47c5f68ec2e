#include "apps/fftune/check_cases.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "core/error.hpp"
#include "core/routing.hpp"

namespace fftune::tool {

namespace {

std::string unsupported(const Op& op, const Problem& problem, DeviceKind kind) {
  const auto dtypes = op.dtypes(kind);
  if (std::find(dtypes.begin(), dtypes.end(), problem.dtype) == dtypes.end())
    return fmt::format("{} has no {} {}", op.name(), dtype_name(problem.dtype),
                       kind == DeviceKind::cpu ? "on the CPU" : "on a GPU");
  try {
    canonical(op, problem, kind);
    return "";
  } catch (const Error& error) {
    return error.what();  // what a record holds is a candidate: named, and the next follows
  }
}

/// The most tokens whose work is within the bound; work grows at least linearly with them.
std::int64_t affordable_tokens(const Op& op, const Problem& problem, double max_flops) {
  const std::int64_t tokens = problem.size(op.token_size());
  const double flops = cost_of(op, problem).flops;
  if (max_flops <= 0 || flops <= max_flops) return tokens;
  return std::max<std::int64_t>(
      1, static_cast<std::int64_t>(std::floor(static_cast<double>(tokens) * max_flops / flops)));
}

void add_tokens(const Op& op, double max_flops, CheckedRecord& record) {
  const std::int64_t own = record.problem.size(op.token_size());
  std::set<std::int64_t> tokens;
  for (const std::int64_t count : {std::int64_t{1}, own - 1, own, own + 1}) {
    if (count < 1) continue;
    const auto least = affordable_tokens(
        op, record.problem.with_size(std::string(op.token_size()), count), max_flops);
    record.capped = record.capped || least < count;
    tokens.insert(least);
  }
  // Lowering own - 1, own and own + 1 gives the same number but for rounding: one is enough.
  if (record.capped && tokens.size() > 2) tokens = {*tokens.begin(), *tokens.rbegin()};
  record.tokens.assign(tokens.begin(), tokens.end());
}

/// What is tuned with one routing serves all others, which are as ordinary: two more of each
/// problem that has one.
std::set<Problem> with_other_routings(const Catalog& catalog, const Problem& problem) {
  std::set<Problem> all{problem};
  for (const Op* op : catalog.ops) {
    if (op->name() != problem.op) continue;
    for (const OptionField& field : op->options())
      for (const char* routing : {"uniform", "zipf:1.5"}) {
        Problem other = problem;
        if (!field.routing || !other.options.contains(field.name)) continue;
        // The file of a routing may be elsewhere.
        const auto own = parse_routing(problem.options.at(field.name));
        if (own && !own->file.empty() && !std::filesystem::exists(own->file)) all.erase(problem);
        other.options[field.name] = routing;
        all.insert(std::move(other));
      }
  }
  return all;
}

}  // namespace

Problem layer_of(const Op& op, const Problem& problem) {
  return problem.with_size(std::string(op.token_size()), 1);
}

std::vector<CheckedRecord> checked_records(const PresetLibrary& presets, const Catalog& catalog,
                                           DeviceKind kind, double max_flops,
                                           const std::function<bool(const Problem&)>& admit) {
  std::set<Problem> problems;
  for (const PresetFile& file : presets.files())
    for (const PresetRecord& record : file.records)
      if (admit(record.problem)) problems.merge(with_other_routings(catalog, record.problem));

  std::vector<CheckedRecord> records;
  for (const Problem& problem : problems) {
    CheckedRecord record;
    record.problem = problem;
    const auto op = std::find_if(catalog.ops.begin(), catalog.ops.end(),
                                 [&](const Op* each) { return each->name() == problem.op; });
    record.skipped = op == catalog.ops.end() ? fmt::format("there is no op '{}'", problem.op)
                                             : unsupported(**op, problem, kind);
    if (record.skipped.empty()) add_tokens(**op, max_flops, record);
    records.push_back(std::move(record));
  }
  return records;
}

}  // namespace fftune::tool
