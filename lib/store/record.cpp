#include "store/record.hpp"

#include "core/utc.hpp"
#include "registry/catalog.hpp"

namespace fftune {

Recipe PresetRecord::recipe() const {
  Recipe recipe;
  for (const auto& stage : stages) recipe.push_back(stage.variant);
  return recipe;
}

Provenance provenance_now(const DeviceFacts& facts, std::uint64_t seed) {
  return {.fftune = FFTUNE_VERSION,
          .device = facts.name,
          .driver = facts.driver,
          .toolkit = facts.toolkit,
          .clock_mhz = facts.clock_hz / 1e6,
          .date = utc_now(),
          .seed = seed};
}

PresetDevice preset_device(const DeviceFacts& facts) {
  return {facts.slug(), facts.name, facts.kind, facts.arch, facts.multiprocessors, {}};
}

Comparison comparison_of(const Op& op) {
  Comparison comparison{std::string(op.token_size())};
  std::vector<SizeField> rare = op.sizes();
  for (const auto& size : rare)
    if (size.performance_neutral) comparison.neutral.insert(size.name);
  std::erase_if(rare, [](const SizeField& size) { return !size.when_absent; });
  if (!rare.empty())
    comparison.unified = [tokens = comparison.token_size, rare](Problem problem) {
      problem = without_defaults(rare, tokens, std::move(problem));
      for (const SizeField& size : rare)
        if (const auto value = size_or_absent(size, problem); size.compared_when_absent && value)
          problem.sizes[size.name] = *value;
      return problem;
    };
  for (const auto& option : op.options()) {
    if (option.number) comparison.numbers.insert(option.name);
    if (option.pattern || option.routing) comparison.patterns.insert(option.name);
    if (option.performance_neutral) comparison.neutral.insert(option.name);
  }
  return comparison;
}

Comparison comparison_of(const Catalog& catalog, std::string_view op) {
  for (const Op* each : catalog.ops)
    if (each->name() == op) return comparison_of(*each);
  return {};
}

Problem compared_part(const Problem& problem, const Comparison& comparison) {
  Problem part = comparison.unified ? comparison.unified(problem) : problem;
  for (const auto& name : comparison.neutral) {
    part.sizes.erase(name);
    part.options.erase(name);
  }
  return part;
}

std::map<Problem, PresetRecord> by_compared_part(const std::vector<PresetRecord>& records,
                                                 const Comparison& comparison) {
  std::map<Problem, PresetRecord> all;
  for (const auto& record : records) {
    const auto [known, added] = all.try_emplace(compared_part(record.problem, comparison), record);
    if (!added && known->second.provenance.date <= record.provenance.date) known->second = record;
  }
  return all;
}

}  // namespace fftune
