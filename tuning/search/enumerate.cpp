#include "tuning/search/enumerate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

namespace fftune {
namespace {

std::optional<Span> span_of(const Family& family, const std::vector<StageSpec>& stages) {
  const auto covered = family.stages();
  for (std::size_t first = 0; first + covered.size() <= stages.size(); ++first) {
    bool same = !covered.empty();
    for (std::size_t i = 0; i < covered.size(); ++i)
      same = same && stages[first + i].name == covered[i];
    if (same) return Span{first, covered.size()};
  }
  return {};
}

/// Moves those of `wanted` that are in `variants` to the front; returns how many there were.
std::size_t move_to_front(std::vector<Variant>& variants, const std::vector<Variant>& wanted) {
  std::size_t front = 0;
  for (const auto& variant : wanted) {
    const auto begin = variants.begin() + static_cast<std::ptrdiff_t>(front);
    const auto found = std::find(begin, variants.end(), variant);
    if (found == variants.end()) continue;
    std::rotate(begin, found, found + 1);
    ++front;
  }
  return front;
}

}  // namespace

Enumeration enumerate(const Op& op, const Problem& problem, const DeviceFacts& facts,
                      const WarmStarts& first, bool fallbacks) {
  const auto stages = op.stages(problem);
  Enumeration enumeration;
  std::map<Span, GroupSpec> groups;
  std::map<Span, Recipe> defaults;
  for (const Family* family : op.families()) {
    if (family->device_kind() != facts.kind || family->is_fallback() != fallbacks) continue;
    const auto span = span_of(*family, stages);
    if (!span) continue;  // of another pass of the op
    if (const auto refusal = family->refusal(problem, facts)) {
      enumeration.refusals.push_back(fmt::format("{}: {}", family->name(), *refusal));
      continue;
    }
    const auto feasible = family->space(problem, facts).feasible();
    if (feasible.empty()) {
      enumeration.refusals.push_back(
          fmt::format("{}: its constraints leave no variant", family->name()));
      continue;
    }
    auto& group = groups[*span];
    group.span = *span;
    const std::string name(family->name());
    for (const auto& config : feasible) group.variants.push_back({name, config});
    defaults[*span].push_back({name, family->default_config(problem, facts)});
  }
  for (auto& [span, group] : groups) {
    Recipe wanted = first.on_record;
    for (const Recipe& rest : {defaults[span], first.others})
      wanted.insert(wanted.end(), rest.begin(), rest.end());
    group.warm_starts =
        move_to_front(group.variants, completed(op, problem, facts, std::move(wanted)));
    enumeration.groups.push_back(std::move(group));
  }
  return enumeration;
}

std::vector<GroupSpec> enumerate_only(const Op& op, const Problem& problem,
                                      const DeviceFacts& facts, const std::vector<Variant>& only) {
  auto groups = enumerate(op, problem, facts, {}, false).groups;
  for (auto& slow : enumerate(op, problem, facts, {}, true).groups) {
    const auto same = std::find_if(groups.begin(), groups.end(),
                                   [&](const GroupSpec& group) { return group.span == slow.span; });
    if (same == groups.end())
      groups.push_back(std::move(slow));
    else
      same->variants.insert(same->variants.end(), slow.variants.begin(), slow.variants.end());
  }
  const Recipe wanted = completed(op, problem, facts, only);
  for (auto& group : groups) {
    group.warm_starts = move_to_front(group.variants, wanted);
    group.variants.resize(group.warm_starts);
  }
  std::erase_if(groups, [](const GroupSpec& group) { return group.variants.empty(); });
  return groups;
}

bool covers(const std::vector<Span>& spans, std::size_t stage_count) {
  std::vector<bool> reached(stage_count + 1);
  reached[0] = true;
  for (std::size_t stage = 0; stage < stage_count; ++stage)
    for (const auto& span : spans)
      if (reached[stage] && span.first_stage == stage) reached[stage + span.stage_count] = true;
  return reached[stage_count];
}

std::vector<GroupSpec> fallbacks_needed(const std::vector<Span>& groups,
                                        std::vector<GroupSpec> fallbacks, std::size_t stage_count) {
  std::vector<bool> served(stage_count);
  for (const auto& span : groups)
    for (std::size_t i = 0; i < span.stage_count; ++i) served[span.first_stage + i] = true;
  if (std::find(served.begin(), served.end(), false) == served.end()) return fallbacks;
  std::erase_if(fallbacks, [&](const GroupSpec& group) {
    for (std::size_t i = 0; i < group.span.stage_count; ++i)
      if (!served[group.span.first_stage + i]) return false;
    return true;
  });
  return fallbacks;
}

}  // namespace fftune
