#include "apps/fftune/report/report.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "apps/fftune/presets/comparison.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "tuning/decide/verdict.hpp"

namespace fftune::tool {

namespace {

const Op* op_named(const std::string& name, const Catalog& catalog) {
  const auto found = std::find_if(catalog.ops.begin(), catalog.ops.end(),
                                  [&](const Op* each) { return each->name() == name; });
  return found == catalog.ops.end() ? nullptr : *found;
}

/// The size that counts tokens; for an op that is no longer in the catalog the last size, which is
/// "m" for most.
std::string token_size_of(const Problem& problem, const Catalog& catalog) {
  if (const Op* op = op_named(problem.op, catalog)) {
    const std::string name(op->token_size());
    if (problem.sizes.contains(name)) return name;
  }
  return problem.sizes.contains("m") || problem.sizes.empty() ? "m" : problem.sizes.rbegin()->first;
}

/// The text that all numbers of tokens of a layer share: "fwd bf16 act=silu d=1024 h=2048".
std::string layer_text(const Problem& problem, const std::string& token_size) {
  Problem layer = problem;
  layer.sizes.erase(token_size);
  return layer.text().substr(problem.op.size() + 1);
}

/// Where a problem is drawn, the same for records, benches and comparisons.
Json place_json(const Problem& problem, const std::string& device, const Catalog& catalog) {
  const std::string token_size = token_size_of(problem, catalog);
  const auto tokens = problem.sizes.find(token_size);
  return {
      {"device", device},          {"op", problem.op},
      {"problem", problem.text()}, {"layer", layer_text(problem, token_size)},
      {"token_size", token_size},  {"tokens", tokens == problem.sizes.end() ? 1 : tokens->second}};
}

/// The members of both objects.
Json joined(Json first, const Json& second) {
  for (const auto& [name, value] : std::get<Json::Object>(second.data)) first[name] = value;
  return first;
}

Json timed_json(const std::vector<Timed>& all) {
  Json json = Json::Array();
  for (const Timed& each : all) json.push_back({{"id", each.id}, {"us", each.median_us}});
  return json;
}

Json stages_json(const std::vector<StageRecord>& stages) {
  Json json = Json::Array();
  for (const StageRecord& stage : stages)
    json.push_back({{"stages", fmt::format("{}", fmt::join(stage.stages, "+"))},
                    {"id", stage.variant.id()},
                    {"us", stage.median_us},
                    {"ties", timed_json(stage.ties)},
                    {"runners_up", timed_json(stage.runners_up)},
                    {"feasible", stage.feasible},
                    {"measured", stage.measured},
                    {"failed", stage.failed}});
  return json;
}

Json record_data(const PresetRecord& record, const PresetFile& file, std::size_t path,
                 const Catalog& catalog) {
  const Verdict& verdict = record.verdict;
  const Provenance& from = record.provenance;
  const Json place = place_json(record.problem, file.device.name, catalog);
  const Json own = {
      {"path", path},
      {"file", file.path.string()},
      {"us", verdict.median_us},
      {"low", verdict.interval_low_us},
      {"high", verdict.interval_high_us},
      {"floor", verdict.median_us * verdict.roofline_fraction},
      {"roofline", verdict.roofline_fraction},
      {"limit", verdict.limit},
      {"unfused", verdict.unfused_ratio},
      {"noise", verdict.noise},
      {"strategy", verdict.strategy},
      {"complete", verdict.complete},
      {"decided", verdict.decided},
      {"doubts", doubts(record, catalog, file.device.kind)},
      {"disturbances", verdict.disturbances},
      {"error", record.error},
      {"tolerance", record.tolerance},
      {"stages", stages_json(record.stages)},
      {"date", from.date},
      {"provenance",
       fmt::format("fftune {}, {}, driver {}, toolkit {}, {:.0f} MHz, seed "
                   "{}",
                   from.fftune, from.device, from.driver, from.toolkit, from.clock_mhz, from.seed)},
      {"command", search_command(record.problem, verdict, from, catalog)}};
  return joined(place, own);
}

Json group_data(const GroupSearch& group) {
  Json best = Json::Array(), parameters = Json::Array(), failures = Json::Array();
  for (const BestSoFar& step : group.best)
    best.push_back(Json::Array{step.seconds, step.variants, step.microseconds});
  for (const auto& [name, values] : group.parameters) {
    Json list = Json::Array();
    for (const ValueWorth& worth : values)
      list.push_back({{"value", worth.value}, {"us", worth.best_us}, {"variants", worth.variants}});
    parameters.push_back({{"name", name}, {"values", std::move(list)}});
  }
  for (const Failures& each : group.failures)
    failures.push_back(
        {{"kind", each.kind}, {"reason", each.reason}, {"id", each.id}, {"count", each.count}});
  return {{"stages", group.stages},
          {"best", std::move(best)},
          {"seconds", group.seconds},
          {"measured", group.measured},
          {"cached", group.cached},
          {"compile_seconds", group.compile_seconds},
          {"winner", group.winner},
          {"winner_us", group.winner_us},
          {"parameters", std::move(parameters)},
          {"failures", std::move(failures)}};
}

Json search_data(const SearchSummary& search) {
  Json groups = Json::Array();
  for (const GroupSearch& group : search.groups) groups.push_back(group_data(group));
  return {{"device", search.header.device},
          {"op", search.problem.substr(0, search.problem.find('/'))},
          {"problem", search.problem},
          {"journal", search.path.filename().string()},
          {"provenance", fmt::format("fftune {}, driver {}, toolkit {}", search.header.fftune,
                                     search.header.driver, search.header.toolkit)},
          {"groups", std::move(groups)}};
}

/// Adds the rows of a bench document. Throws Error(invalid_input) for a field of another type.
void add_bench(const Json& document, const Catalog& catalog, Json& benches) {
  const Json* const device = document.find("device");
  const std::string name = device ? text_in(*device, "name", "") : "";
  if (document.find("problems") == nullptr) return;
  for (const Json& row : array_in(document, "problems")) {
    const Json* const drawn = row.find("problem");
    if (drawn == nullptr || row.find("entries") == nullptr) continue;
    const Json::Array& entries = array_in(row, "entries");
    if (entries.empty()) continue;
    const Problem problem = problem_from_json(json_line(*drawn)).problem;
    Json bench = place_json(problem, name, catalog);
    bench["floor"] = number_in(row, "floor_us", 0.0);
    bench["limit"] = text_in(row, "limit", "");
    for (const Json& entry : entries)
      bench["entries"].push_back({{"name", text_in(entry, "name", "")},
                                  {"summary", text_in(entry, "summary", "")},
                                  {"us", number_in(entry, "median_us", 0.0)},
                                  {"low", number_in(entry, "low_us", 0.0)},
                                  {"high", number_in(entry, "high_us", 0.0)},
                                  {"failure", text_in(entry, "failure", "")}});
    benches.push_back(std::move(bench));
  }
}

/// Every record beside the first of the same problem.
Json comparisons_of(const ReportInput& input) {
  std::map<std::string, std::pair<std::size_t, Measured>> first;
  Json comparisons = Json::Array();
  std::size_t place = 0;
  for (const ReportedFile& file : input.files)
    for (const PresetRecord& record : file.presets.records) {
      const Measured measured = measured_of(record.verdict);
      const auto [entry, is_first] =
          first.emplace(record.problem.text(), std::pair(place, measured));
      const auto& [before, measured_before] = entry->second;
      if (!is_first)
        comparisons.push_back({{"before", before},
                               {"after", place},
                               {"verdict", comparison_name(compare(measured_before, measured))}});
      ++place;
    }
  return comparisons;
}

}  // namespace

std::string search_command(const Problem& problem, const Verdict& verdict,
                           const Provenance& provenance, const Catalog& catalog) {
  ShellCommand command({"fftune", problem.op});
  if (problem.pass != "fwd") command.option("pass", problem.pass);
  command.option("dtype", std::string(dtype_name(problem.dtype)));
  const Op* op = op_named(problem.op, catalog);
  for (const auto& [name, value] : problem.options) {
    const auto usual = [&, &name = name, &value = value](const OptionField& field) {
      return field.name == name && (field.pass.empty() || field.pass == problem.pass) &&
             !field.choices.empty() && field.choices.front() == value;
    };
    const auto fields = op == nullptr ? std::vector<OptionField>() : op->options();
    if (std::none_of(fields.begin(), fields.end(), usual)) command.option(name, value);
  }
  for (const auto& [name, value] : problem.sizes) command.option(name, fmt::format("{}", value));
  if (!verdict.strategy.empty()) command.option("strategy", verdict.strategy);
  if (provenance.seed != 0) command.option("seed", fmt::format("{}", provenance.seed));
  return command.text();
}

Json report_data(ReportInput& input, const Catalog& catalog, const std::string& date) {
  Json records = Json::Array(), searches = Json::Array(), benches = Json::Array();
  for (const ReportedFile& file : input.files)
    for (const PresetRecord& record : file.presets.records)
      records.push_back(record_data(record, file.presets, file.path, catalog));
  for (const SearchSummary& search : input.searches) searches.push_back(search_data(search));
  for (const ReportedBench& bench : input.benches) {
    Json own = Json::Array();
    try {
      add_bench(bench.document, catalog, own);
    } catch (const Error& error) {
      input.left_out.push_back(fmt::format("{}: {}: make it again by `fftune bench --json`",
                                           input.paths.at(bench.path), error.what()));
      continue;
    }
    for (const Json& row : std::get<Json::Array>(own.data)) benches.push_back(row);
  }
  return {{"fftune", FFTUNE_VERSION},
          {"date", date},
          {"paths", input.paths},
          {"records", std::move(records)},
          {"searches", std::move(searches)},
          {"benches", std::move(benches)},
          {"comparisons", comparisons_of(input)}};
}

}  // namespace fftune::tool
