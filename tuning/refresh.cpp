#include "tuning/tuner.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/error.hpp"

namespace fftune {
namespace {

std::string change_of(const char* what, const std::string& before, const std::string& now) {
  const auto named = [](const std::string& version) { return version.empty() ? "none" : version; };
  return fmt::format("{} {} instead of {}", what, named(now), named(before));
}

std::string change_of_family(const StageRecord& stage, const Catalog& catalog, const Op& op) {
  const auto families = op.families();
  const auto found = std::find_if(families.begin(), families.end(), [&](const Family* family) {
    return family->name() == stage.variant.family;
  });
  if (found == families.end())
    return fmt::format("there is no family {} any more", stage.variant.family);
  if (catalog.sources->hash((*found)->sources()) == stage.source_hash) return "";
  return fmt::format("other sources of {}", stage.variant.family);
}

void add_variant(Variant variant, std::vector<Variant>& all) {
  if (std::find(all.begin(), all.end(), variant) == all.end()) all.push_back(std::move(variant));
}

/// A file may be written by people too: an entry that names no variant is left out.
void add_named(const std::string& id, std::vector<Variant>& all) {
  try {
    add_variant(Variant::parse(id), all);
  } catch (const Error&) {
  }
}

}  // namespace

std::vector<std::string> changes_since(const PresetRecord& record, const Catalog& catalog,
                                       const DeviceFacts& facts) {
  const Op& op = catalog.op(record.problem.op);
  std::vector<std::string> changes;
  for (const auto& stage : record.stages)
    if (auto change = change_of_family(stage, catalog, op); !change.empty())
      changes.push_back(std::move(change));
  const auto& made = record.provenance;
  if (made.driver != facts.driver)
    changes.push_back(change_of("driver", made.driver, facts.driver));
  if (made.toolkit != facts.toolkit)
    changes.push_back(change_of("toolkit", made.toolkit, facts.toolkit));
  return changes;
}

std::vector<Variant> stored_variants(const PresetRecord& record) {
  std::vector<Variant> all = record.recipe();
  for (const auto& stage : record.stages) {
    for (const auto& tie : stage.ties) add_named(tie.id, all);
    for (const auto& next : stage.runners_up) add_named(next.id, all);
  }
  return all;
}

std::vector<Variant> refreshed_variants(const PresetRecord& record, const Catalog& catalog,
                                        const DeviceFacts& facts) {
  std::vector<Variant> all = stored_variants(record);
  const Op& op = catalog.op(record.problem.op);
  const bool serves = std::any_of(all.begin(), all.end(), [&](const Variant& variant) {
    return illegality(op, record.problem, facts, completed(op, record.problem, facts, variant))
        .empty();
  });
  if (!serves) return all;  // a search begins anew, with more than the untuned recipe
  for (auto& variant : default_recipe(op, record.problem, facts))
    add_variant(std::move(variant), all);
  return all;
}

PresetRecord refreshed(PresetRecord now, const PresetRecord& before) {
  for (auto& stage : now.stages)
    for (const auto& old : before.stages)
      if (old.stages == stage.stages) {
        stage.feasible = old.feasible;
        stage.measured = old.measured;
        stage.failed = old.failed;
      }
  now.verdict.strategy = before.verdict.strategy;
  now.verdict.complete = now.verdict.complete && before.verdict.complete;
  return now;
}

}  // namespace fftune
