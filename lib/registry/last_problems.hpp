// Values that follow from a problem, kept for the problems that were asked for last.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/problem.hpp"

namespace fftune {

/// A search and a compilation ask for every configuration of a problem in turn, and a plan for the
/// whole, its layers and its parts. Any number of threads may ask.
template <typename Value>
class OfLastProblems {
 public:
  std::shared_ptr<const Value> of(const Problem& problem, const std::function<Value()>& make) {
    {
      const std::lock_guard lock(mutex_);
      const auto known = std::find_if(known_.begin(), known_.end(),
                                      [&](const Known& each) { return each.problem == problem; });
      if (known != known_.end()) return known->value;
    }
    auto value = std::make_shared<const Value>(make());
    const std::lock_guard lock(mutex_);
    if (known_.size() == most) known_.erase(known_.begin());
    known_.push_back({problem, value});
    return value;
  }

 private:
  struct Known {
    Problem problem;
    std::shared_ptr<const Value> value;
  };
  static constexpr std::size_t most = 4;

  std::mutex mutex_;
  std::vector<Known> known_;  // the oldest first
};

}  // namespace fftune
