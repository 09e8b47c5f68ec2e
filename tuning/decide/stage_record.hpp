// What a record says of the stages of one group: the winner, and all that came close.
#pragma once

#include <cstddef>
#include <vector>

#include "store/record.hpp"
#include "tuning/search/group.hpp"
#include "tuning/search/session.hpp"

namespace fftune {

/// Those that decide the group: the finalists that work, or all that were timed.
std::vector<std::size_t> deciders(const Searched& searched);

StageRecord stage_record(const Session& session, const Searched& searched, std::size_t variant);

}  // namespace fftune
