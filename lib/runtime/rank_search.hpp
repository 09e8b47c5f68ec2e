// A search that runs on all ranks of a group at once: of problems whose plans contain collectives.
#pragma once

#include <chrono>
#include <functional>

#include "runtime/group.hpp"
#include "runtime/plan.hpp"

namespace fftune {

struct RankSearch {
  std::chrono::milliseconds budget{10000};
  /// Seconds of one run of the plan by this rank's clock, given those that were measured.
  std::function<double(double)> clock = [](double seconds) { return seconds; };
};

struct RankSearchResult {
  Recipe recipe;
  double before = 0, after = 0;  // seconds of a run: of the recipe that it began with, and of this
  int tried = 0;                 // variants
};

/// Searches the recipe of `problem`, beginning with `start`: first other families of several stages
/// together, then in turn each variant gives way to another configuration or family of the same
/// stages. A change that makes the plan faster stays.
/// All ranks call it with the same problem and run each candidate together. A time is the largest
/// of the ranks', and so are all decisions, so every rank returns the same recipe. `problem` is
/// canonical, with link=peers, and none that repeats another. Throws Error(invalid_input) if ranks
/// begin with different recipes, and Error(device_fault) as Group::check() does.
RankSearchResult search_on_ranks(Backend& backend, const Group& group, const Op& op,
                                 const Problem& problem, Recipe start, const RankSearch& options);

}  // namespace fftune
