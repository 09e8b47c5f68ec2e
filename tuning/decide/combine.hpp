// From the best of each group to end-to-end candidates: which variants together cover the op
// fastest.
#pragma once

#include <cstddef>
#include <vector>

#include "tuning/search/group.hpp"

namespace fftune {

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
  double sum_us = 0;  // of the parts' medians: an estimate, the parts were timed apart
};

/// Whether both are of the same variants.
bool same(const Combination& a, const Combination& b);

/// All combinations whose sum is within `band` times the least, fastest first, at most `count`.
/// Equal sums keep the order of the choices.
std::vector<Combination> combine(const std::vector<GroupChoices>& groups, std::size_t stage_count,
                                 double band, std::size_t count);

}  // namespace fftune
