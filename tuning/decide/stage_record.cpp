#include "tuning/decide/verdict.hpp"

#include <algorithm>
#include <cmath>

namespace fftune {
namespace {

constexpr std::size_t most_runners_up = 3;

Timed timed(const Outcome& outcome) {
  return {outcome.id, outcome.median_us, outcome.bits};
}

/// Fills up the runners-up from those that did not come into the finals.
void add_runners_up(const VariantGroup& group, const std::vector<std::size_t>& finalists,
                    std::size_t winner, StageRecord& record) {
  auto others = group.timed();
  std::erase_if(others, [&](std::size_t index) {
    return index == winner ||
           std::find(finalists.begin(), finalists.end(), index) != finalists.end();
  });
  const auto all = finalists_of(group, others);
  for (const auto at : by_preference(all, 0))
    if (record.runners_up.size() < most_runners_up)
      record.runners_up.push_back(timed(group.outcome(others[at])));
}

}  // namespace

std::vector<std::size_t> deciders(const Searched& searched) {
  auto indices = searched.finalists;
  std::erase_if(
      indices, [&](std::size_t index) { return !std::isfinite(searched.group->median_us(index)); });
  if (indices.empty()) indices = searched.group->timed();
  return indices;
}

StageRecord stage_record(const Session& session, const Searched& searched, std::size_t variant) {
  const VariantGroup& group = *searched.group;
  StageRecord record;
  const auto stages = session.op().stages(session.problem());
  for (std::size_t i = 0; i < group.span().stage_count; ++i)
    record.stages.push_back(stages[group.span().first_stage + i].name);
  record.variant = group.variants()[variant];
  const auto& family = family_of(session.op(), record.variant.family);
  record.source_hash = session.catalog().sources->hash(family.sources());
  record.median_us = group.median_us(variant);
  record.bits = group.outcome(variant).bits;

  const auto indices = deciders(searched);
  const auto all = finalists_of(group, indices);
  const auto ties = tied(all, session.options().tie_band).size();
  const auto order = by_preference(all, session.options().tie_band);
  for (std::size_t rank = 0; rank < order.size(); ++rank) {
    if (indices[order[rank]] == variant) continue;
    const auto entry = timed(group.outcome(indices[order[rank]]));
    if (rank < ties)
      record.ties.push_back(entry);
    else if (record.runners_up.size() < most_runners_up)
      record.runners_up.push_back(entry);
  }
  add_runners_up(group, indices, variant, record);
  record.feasible = static_cast<int>(group.variants().size());
  for (std::size_t i = 0; i < group.variants().size(); ++i) {
    record.measured += group.outcome(i).kind == OutcomeKind::measured;
    // A correct variant whose bits differ from the requested ones has not failed.
    record.failed += group.outcome(i).failed() && group.outcome(i).kind != OutcomeKind::other_bits;
  }
  return record;
}

}  // namespace fftune
