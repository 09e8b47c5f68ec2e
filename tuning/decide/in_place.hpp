// Tuning in place, for an op made of ops: choices of its stages are timed within the whole recipe.
// The kernels before and behind a kernel change its time: launches overlap, and results are still
// in the caches.
#pragma once

#include <vector>

#include "tuning/decide/end_to_end.hpp"
#include "tuning/search/group.hpp"
#include "tuning/search/session.hpp"

namespace fftune {

/// Whether choices of the session's problem are timed in place.
bool is_tuned_in_place(const Session& session);

/// The part of a search's time that stays for that and for the verdict.
constexpr double in_place_share = 0.45;
/// Tie band of whole recipes: a variant that is 10% slower may make less than 2% of a whole.
constexpr double in_place_tie_band = 0.005;

/// Coordinate descent. It begins with the recipe of the variants that are fastest by themselves.
/// Stage by stage, the best few variants of every group that begins there are timed in the recipe,
/// interleaved with the present one, and a faster one replaces it. That goes on until a round
/// changes nothing, or the time is spent.
///
/// Returns what to decide among: the recipe, others that were about as fast, and last the one that
/// it began with. Empty where nothing covers the op.
std::vector<Combination> tuned_in_place(Session& session, const std::vector<Searched>& groups);

}  // namespace fftune
