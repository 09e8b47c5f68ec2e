// A search that runs on all ranks of a group at once: of problems whose plans contain collectives.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

#include "registry/catalog.hpp"
#include "runtime/group.hpp"
#include "runtime/plan.hpp"
#include "store/record.hpp"

namespace fftune {

struct RankSearch {
  std::chrono::milliseconds budget{10000};  // one candidate is tried even if it is used up
  /// Folder of presets to which rank 0 writes a record; empty: none is made. Given on all ranks or
  /// on none; that of rank 0 counts.
  std::filesystem::path presets = {};
  /// Recipes that the result must not be slower than, besides the one to begin with and that of the
  /// record in `presets`. They are left out if they differ between ranks.
  std::vector<Recipe> present = {};
  /// Seconds of one run of the plan by this rank's clock, given those that were measured.
  std::function<double(double)> clock = [](double seconds) { return seconds; };
};

struct RankSearchResult {
  Recipe recipe;
  double before = 0, after = 0;  // seconds of a run: of the recipe that it began with, and of this
  int tried = 0;                 // variants
  int failed = 0;                // those that do not compile, or are wrong
  bool complete = true;          // false when the budget ended it
  std::optional<PresetRecord> record = {};  // the same on all ranks but for its provenance
};

/// Searches the recipe of `problem`, beginning with `start`: first other families of several stages
/// together, then in turn each variant gives way to another configuration or family of the same
/// stages. A change that makes the plan faster stays, once its results are right on all ranks.
/// All ranks call it with the same problem and run each candidate together. A time is the largest
/// of the ranks', and so are all decisions, so every rank returns the same recipe. With `presets`
/// the winner is timed anew, in turns with `start`, the default and the recipe on record there, and
/// stage by stage. `problem` is canonical, with link=peers, and none that repeats another.
/// Throws Error(invalid_input) if ranks begin with different recipes, Error(unavailable) if `start`
/// is wrong or does not run, or the record cannot be written, and Error(device_fault) as
/// Group::check() does: on all ranks.
RankSearchResult search_on_ranks(Backend& backend, const Group& group, const Catalog& catalog,
                                 const Op& op, const Problem& problem, const Recipe& start,
                                 const RankSearch& options);

}  // namespace fftune
