// Stop rules: why a search should end, and how rules are combined.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

namespace fftune {

/// The resources that a search has spent so far.
struct Spent {
  double seconds = 0;
  int tried = 0;  // variants verified and timed
};

/// The reason to stop, one line for the user; empty: go on.
using StopRule = std::function<std::string(const Spent&)>;

/// `all` is the budget that contains these seconds, if there is one.
StopRule stop_after_seconds(double seconds, double all = 0);
StopRule stop_after_variants(int variants);
/// `flag` must outlive the rule; another thread or a signal handler sets it.
StopRule stop_when(const std::atomic<bool>& flag, std::string reason);
/// The reason of the first that has one.
StopRule any_of(std::vector<StopRule> rules);

}  // namespace fftune
