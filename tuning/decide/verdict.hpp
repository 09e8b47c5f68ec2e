// The verdict: end-to-end candidates verified and timed, the winner among them, and its record.
#pragma once

#include <string>
#include <vector>

#include "tuning/search/group.hpp"
#include "tuning/search/session.hpp"

namespace fftune {

/// A share of a limit beyond the noise of two measurements: the limit is not the one that applied.
constexpr double most_share_of_limit = 1.05;

/// Whether the timed variants cover the op.
bool have_cover(const std::vector<Searched>& groups, std::size_t stage_count);

/// Verifies and times the best combinations and fills in result.record, the outcomes of
/// end-to-end candidates, baselines and notes. Without a cover that works, result.record stays
/// empty. Where times contradict
/// each other, they are measured and the winner is chosen again; it is not decided if that does
/// not help.
void conclude(Session& session, std::vector<Searched> groups, TuneResult& result);

}  // namespace fftune
