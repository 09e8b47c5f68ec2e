// The part of a record for the stages of one group: the winner, its ties and the runners-up.
#pragma once

#include <cstddef>
#include <vector>

#include "store/record.hpp"
#include "tuning/search/group.hpp"
#include "tuning/search/session.hpp"

namespace fftune {

/// The variants that the group's winner is chosen from: the finalists that work, or else all that
/// were timed.
std::vector<std::size_t> deciders(const Searched& searched);

StageRecord stage_record(const Session& session, const Searched& searched, std::size_t variant);

}  // namespace fftune
