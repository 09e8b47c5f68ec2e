// The preset record of a search on the ranks of a group.
#pragma once

#include <vector>

#include "ranks/lockstep.hpp"
#include "ranks/rank_search.hpp"

namespace fftune {

/// Variants of the stages that one variant of a recipe covers.
struct StageCounts {
  int feasible = 0, measured = 0, failed = 0;
};

/// Times what the search found, the recipes `present` that the record must not be slower than and
/// the default in turns, and the fastest stage by stage: the slowest rank's times, and the largest
/// error. `counts` has one entry for each variant of the recipe that was found; without it, the
/// search ended before these.
PresetRecord record_on_ranks(Lockstep& ranks, const Catalog& catalog, const RankSearchResult& found,
                             const std::vector<Recipe>& present,
                             const std::vector<StageCounts>& counts);

}  // namespace fftune
