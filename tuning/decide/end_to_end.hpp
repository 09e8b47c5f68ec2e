// End-to-end candidates: recipes that cover the whole op, put together from the best variants of
// the groups, verified and timed as they will run.
#pragma once

#include <limits>
#include <vector>

#include "tuning/decide/combine.hpp"
#include "tuning/measure/ties.hpp"
#include "tuning/search/group.hpp"
#include "tuning/search/session.hpp"

namespace fftune {

struct EndToEnd {
  Combination combination;
  Candidate candidate;
  Verified verified;
  int registers = 0;
  double median_us = std::numeric_limits<double>::infinity();
  double low_us = 0;  // 95% confidence interval of the median; 0 and 0 if it was not timed
  double high_us = 0;
};

/// Verifies the combinations as recipes of the whole op, but for those that are among `verified`;
/// those that fail are outcomes.
std::vector<EndToEnd> verified_end_to_end(Session& session, const std::vector<Searched>& groups,
                                          const std::vector<Combination>& combinations,
                                          const std::vector<EndToEnd>& verified,
                                          TuneResult& result);

/// Times them interleaved and drops those that fail. A single candidate is not timed here.
void time_end_to_end(Session& session, std::vector<EndToEnd>& contenders, TuneResult& result);

/// As what ties.hpp compares, in their order.
std::vector<Finalist> finalists_of(const std::vector<EndToEnd>& contenders);

}  // namespace fftune
