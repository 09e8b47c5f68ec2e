#include "apps/fftune/check/check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>
#include <thread>
#include <tuple>

#include "apps/fftune/command_line/problem_options.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/distribution.hpp"
#include "core/error.hpp"
#include "core/memory.hpp"
#include "runtime/choice.hpp"
#include "runtime/plan.hpp"
#include "tuning/log.hpp"

namespace fftune::tool {
namespace {

std::string unsupported(const Op& op, const Problem& problem, DeviceKind kind) {
  const auto dtypes = op.dtypes(kind);
  if (std::find(dtypes.begin(), dtypes.end(), problem.dtype) == dtypes.end())
    return fmt::format("{} has no {} {}", op.name(), dtype_name(problem.dtype),
                       kind == DeviceKind::cpu ? "on the CPU" : "on a GPU");
  // One rank can play the peers of a group, but not NCCL.
  if (problem.has("link", "nccl")) return "link=" + needs_group_words(problem);
  return fault_of_recorded(op, problem, kind);
}

std::int64_t lowered_tokens(std::int64_t tokens, double share) {
  return std::max<std::int64_t>(
      1, static_cast<std::int64_t>(std::floor(static_cast<double>(tokens) * share)));
}

/// The most tokens whose work is within the bound; work grows at least linearly with them.
std::int64_t affordable_tokens(const Op& op, const Problem& problem, double max_flops) {
  const std::int64_t tokens = problem.size(op.token_size());
  const double flops = cost_of(op, problem).flops;
  if (max_flops <= 0 || flops <= max_flops) return tokens;
  return lowered_tokens(tokens, max_flops / flops);
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

/// A record tuned with one routing serves all others, which are as ordinary: two more of each
/// problem that has one.
std::set<Problem> with_other_routings(const Catalog& catalog, const Problem& problem) {
  std::set<Problem> all{problem};
  for (const Op* op : catalog.ops) {
    if (op->name() != problem.op) continue;
    for (const OptionField& field : op->options()) {
      if (!field.routing || !problem.options.contains(field.name)) continue;
      const auto own = parse_routing(problem.options.at(field.name));
      if (own && !own->file.empty() && !std::filesystem::exists(own->file)) {
        logging::warn("{} is not there: {} is checked with other routings alone", own->file,
                      problem.text());
        all.erase(problem);
      }
      for (const char* routing : {"uniform", "zipf:1.5"}) {
        Problem other = problem;
        other.options[field.name] = routing;
        all.insert(std::move(other));
      }
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

void put_own_first(const std::vector<PresetFile>& presets, const DeviceFacts& facts,
                   std::vector<CheckedRecord>& records) {
  std::set<Problem> own;
  for (const PresetFile& file : presets)
    if (device_match(file.device, facts) == DeviceMatch::exact)
      for (const PresetRecord& record : file.records) own.insert(record.problem);
  for (CheckedRecord& record : records) record.own = own.contains(record.problem);
  std::stable_partition(records.begin(), records.end(),
                        [](const CheckedRecord& record) { return record.own; });
}

void keep_quick(const Catalog& catalog, double max_bytes, std::vector<CheckedRecord>& records) {
  using Form = std::tuple<std::string, std::string, DType>;
  std::map<Form, const CheckedRecord*> kept;
  const auto work = [&](const CheckedRecord& record) {
    return cost_of(catalog.op(record.problem.op), record.problem).flops;
  };
  for (const CheckedRecord& record : records) {
    if (!record.skipped.empty()) continue;
    const CheckedRecord*& best =
        kept[{record.problem.op, record.problem.pass, record.problem.dtype}];
    const bool better = best == nullptr || (record.own && !best->own) ||
                        (record.own == best->own && work(record) < work(*best));
    if (better) best = &record;
  }
  std::set<Problem> chosen;
  for (const auto& [form, record] : kept) chosen.insert(record->problem);
  std::erase_if(records, [&](const CheckedRecord& record) {
    return !record.skipped.empty() || !chosen.contains(record.problem);
  });
  for (CheckedRecord& record : records) {
    const Op& op = catalog.op(record.problem.op);
    const std::string token_size(op.token_size());
    const std::int64_t own = record.problem.size(token_size);
    const bool has_own =
        std::find(record.tokens.begin(), record.tokens.end(), own) != record.tokens.end();
    std::int64_t tokens = has_own ? own : record.tokens.back();
    const double bytes = cost_of(op, record.problem.with_size(token_size, tokens)).bytes;
    if (max_bytes > 0 && bytes > max_bytes) tokens = lowered_tokens(tokens, max_bytes / bytes);
    record.capped = record.capped || tokens < own;
    record.tokens = {tokens};
  }
}

namespace {

/// The bytes of the tensors that the check of a problem holds, at most `enough` if it is known that
/// all of them fit.
double checked_bytes(const Catalog& catalog, const Op& op, const Problem& problem,
                     const DeviceFacts& facts, const PresetLibrary& presets, double enough) {
  const Problem one = on_one_rank(op, problem, facts.kind);
  const auto tensors = op.tensors(one);
  const double all = held_bytes(tensors, holders_of(op, one, tensors));
  if (all <= enough) return all;
  try {
    const Recipe recipe = choose(catalog, op, problem, facts, presets).recipe;
    return held_bytes(tensors, holders_of(op, one, tensors, facts, recipe));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::unavailable) throw;
    return all;  // the check itself says why no family serves it
  }
}

}  // namespace

void skip_too_large(const Catalog& catalog, const DeviceFacts& facts, const PresetLibrary& presets,
                    const FreeMemory& free, std::vector<CheckedRecord>& records) {
  // Data, results and references.
  constexpr double host_copies = 3;
  const auto on_device = static_cast<double>(free.device), on_host = static_cast<double>(free.host);
  for (CheckedRecord& record : records) {
    if (!record.skipped.empty() || record.tokens.empty()) continue;
    const Op& op = catalog.op(record.problem.op);
    const Problem largest =
        record.problem.with_size(std::string(op.token_size()), record.tokens.back());
    const double bytes = checked_bytes(catalog, op, largest, facts, presets,
                                       std::min(on_device, on_host / host_copies));
    std::string lacking = misfit("it", bytes * host_copies, on_host, "the host");
    if (lacking.empty()) lacking = misfit("it", bytes, on_device, "the device");
    if (!lacking.empty()) record.skipped = "too large for this machine: " + lacking;
  }
}

double estimated_seconds(const Op& op, const Problem& problem, DeviceKind kind) {
  // A few rows of each result have a reference; all of it is run, twice.
  constexpr double reference_flops = 4e9, device_flops_of_core = 2e10, host_bytes = 2e8;
  constexpr double least = 0.02, compile = 1;
  constexpr double reference_rows = 64;
  const double cores = std::max(1u, std::thread::hardware_concurrency());
  const Cost cost = cost_of(op, problem);
  const auto tokens = static_cast<double>(problem.size(op.token_size()));
  const double reference = cost.flops * std::min(1.0, reference_rows / tokens) / reference_flops;
  const double run = kind == DeviceKind::cpu ? 2 * cost.flops / device_flops_of_core : 0;
  return least + (kind == DeviceKind::cpu ? 0 : compile) +
         (reference + run + cost.bytes / host_bytes) / cores;
}

}  // namespace fftune::tool
