#include "tuning/decide/combine.hpp"

#include <algorithm>

namespace fftune {
namespace {

void extend(const std::vector<GroupChoices>& groups, std::size_t stage, std::size_t stage_count,
            const Combination& so_far, std::vector<Combination>& all) {
  if (stage == stage_count) {
    all.push_back(so_far);
    return;
  }
  for (const auto& group : groups) {
    if (group.span.first_stage != stage) continue;
    for (const auto& choice : group.choices) {
      Combination longer = so_far;
      longer.parts.push_back(choice);
      longer.sum_us += choice.median_us;
      extend(groups, stage + group.span.stage_count, stage_count, longer, all);
    }
  }
}

}  // namespace

bool same(const Combination& a, const Combination& b) {
  return std::equal(a.parts.begin(), a.parts.end(), b.parts.begin(), b.parts.end(),
                    [](const Part& left, const Part& right) {
                      return left.group == right.group && left.variant == right.variant;
                    });
}

std::vector<Combination> combine(const std::vector<GroupChoices>& groups, std::size_t stage_count,
                                 double band, std::size_t count) {
  std::vector<Combination> all;
  extend(groups, 0, stage_count, {}, all);
  std::stable_sort(all.begin(), all.end(),
                   [](const Combination& a, const Combination& b) { return a.sum_us < b.sum_us; });
  std::size_t kept = 0;
  while (kept < std::min(count, all.size()) && all[kept].sum_us <= all.front().sum_us * band)
    ++kept;
  all.resize(kept);
  return all;
}

}  // namespace fftune
