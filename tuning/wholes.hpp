// Whole recipes: combinations of what won the groups, verified and timed as they will run.
#pragma once

#include <limits>
#include <vector>

#include "tuning/combine.hpp"
#include "tuning/decide.hpp"
#include "tuning/group.hpp"
#include "tuning/session.hpp"

namespace fftune {

struct Whole {
  Combination combination;
  Candidate candidate;
  Verified verified;
  int registers = 0;
  double median_us = std::numeric_limits<double>::infinity();
  double low_us = 0;  // 95% confidence interval of the median; 0 and 0 if it was not timed
  double high_us = 0;
};

/// Verifies the combinations as whole recipes; those that fail are outcomes.
std::vector<Whole> verified_wholes(Session& session, const std::vector<Searched>& groups,
                                   const std::vector<Combination>& combinations,
                                   TuneResult& result);

/// Times them in turn and drops those that fail; nothing to time if there is but one.
void time_wholes(Session& session, std::vector<Whole>& wholes, TuneResult& result);

/// As what decide.hpp compares, in their order.
std::vector<Contestant> contestants(const std::vector<Whole>& wholes);

}  // namespace fftune
