// What a record says of the stages of one group: the winner, and all that came close.
#pragma once

#include <cstddef>
#include <vector>

#include "store/record.hpp"
#include "tuning/decide.hpp"
#include "tuning/group.hpp"
#include "tuning/session.hpp"

namespace fftune {

/// Those that decide the group: the finalists that work, or all that were timed.
std::vector<std::size_t> deciders(const Searched& searched);

/// As what decide.hpp compares, in the order of `indices`.
std::vector<Contestant> contestants(const Group& group, const std::vector<std::size_t>& indices);

StageRecord stage_record(const Session& session, const Searched& searched, std::size_t variant);

}  // namespace fftune
