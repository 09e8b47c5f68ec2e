// End-to-end candidates: recipes that cover the whole op, put together from the best variants of
// the groups, verified and timed as they will run.
#pragma once

#include <cstddef>
#include <limits>
#include <vector>

#include "measure/statistics.hpp"
#include "tuning/search/group.hpp"
#include "tuning/search/session.hpp"

namespace fftune {

// From the best of each group to end-to-end candidates: which variants together cover the op
// fastest.

/// A variant of a group that may be part of a recipe.
struct Part {
  std::size_t group = 0;
  std::size_t variant = 0;
  double median_us = 0;
};

/// The choices of one group, the most wanted first.
struct GroupChoices {
  Span span;
  std::vector<Part> choices;
};

/// Choices in stage order that cover every stage once.
struct Combination {
  std::vector<Part> parts;
  double sum_us = 0;       // of the parts' medians: an estimate, the parts were timed apart
  bool expected = false;   // timed end to end however little time is left
  bool on_record = false;  // likewise, and after an interruption too
};

/// Whether both are of the same variants.
bool same(const Combination& a, const Combination& b);

/// All combinations whose sum is within `band` times the least, fastest first, at most `count`.
/// Equal sums keep the order of the choices.
std::vector<Combination> combine(const std::vector<GroupChoices>& groups, std::size_t stage_count,
                                 double band, std::size_t count);

struct EndToEnd {
  Combination combination;
  Candidate candidate;
  Verified verified;
  int registers = 0;
  std::vector<double> samples_us{};  // taken in turns with those of the others
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

/// Times them interleaved, with more samples while some are not told from the fastest, and drops
/// those that fail. A single candidate is not timed here.
void time_end_to_end(Session& session, std::vector<EndToEnd>& contenders, TuneResult& result);

/// As what statistics.hpp compares, in their order.
std::vector<Finalist> finalists_of(const std::vector<EndToEnd>& contenders);

}  // namespace fftune
