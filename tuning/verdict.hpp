// The verdict: whole recipes verified and timed, the winner among them, and its record.
#pragma once

#include <string>
#include <vector>

#include "tuning/group.hpp"
#include "tuning/session.hpp"
#include "tuning/tuner.hpp"

namespace fftune {

/// Whether what was timed covers the op.
bool have_cover(const std::vector<Searched>& groups, std::size_t stage_count);

/// Verifies and times the best combinations and fills in result.record, its outcomes of whole
/// recipes, baselines and notes. Without a cover that works, result.record stays empty.
void conclude(Session& session, const std::vector<Searched>& groups, TuneResult& result);

}  // namespace fftune
