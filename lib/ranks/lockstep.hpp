// Plans of a group's collectives on all ranks at once: compiled, verified and timed. Every rank
// calls the same functions in the same order, and all get the same results.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "measure/buffer_sets.hpp"
#include "measure/runner.hpp"
#include "runtime/group.hpp"
#include "runtime/plan.hpp"
#include "verify/verifier.hpp"

namespace fftune {

class Lockstep {
 public:
  /// Draws the same inputs on all ranks, so that a rank's reference is that of one which plays all.
  /// `problem` is canonical, with link=peers, and none that repeats another. `clock` gives the
  /// seconds of this rank's clock. Throws Error(unavailable) on all ranks if the tensors do not fit
  /// on one.
  Lockstep(Backend& backend, const Group& group, const Op& op, const Problem& problem,
           std::function<double(double)> clock);

  /// Whether all ranks call it with the same text.
  bool all_have(const std::string& text) const;

  /// Rank 0's text, on all ranks: six bytes a message, so short ones.
  std::string of_rank_0(const std::string& text) const;

  /// Calls body(). If it throws on any rank, throws on all: the rank's own error there, and
  /// elsewhere that another rank could not do `what`.
  void on_all(const std::string& what, const std::function<void()>& body) const;

  /// Nothing: a rank cannot make it.
  std::optional<Plan> plan(const Recipe& recipe);

  /// Verifies those of a plan. Passed: on all ranks, with the same bits. The error is the largest.
  Verification verify(const Executables& executables);

  /// Computes what stages behind others read, for timing stages by themselves.
  void compute_intermediates(const Plan& plan);

  /// Seconds of a run of each, taken in turns: `samples` each, of the slowest rank. One that takes
  /// longer than `give_up` by far has one sample.
  std::vector<std::vector<double>> time(const std::vector<Executables>& all, int samples,
                                        double give_up = std::numeric_limits<double>::infinity());

  Backend& backend() const { return backend_; }
  const Group& group() const { return group_; }
  const Op& op() const { return op_; }
  const Problem& problem() const { return problem_; }
  const DeviceFacts& facts() const { return backend_.facts(); }
  static constexpr std::uint64_t seed = 1;

 private:
  /// The largest of the ranks' values, place by place.
  std::vector<double> largest(std::vector<double> values) const;

  Backend& backend_;
  const Group& group_;
  const Op& op_;
  const Problem problem_;
  std::function<double(double)> clock_;
  std::optional<BufferSets> sets_;
  std::vector<std::vector<void*>> tensors_;  // by set
  std::unique_ptr<Buffer> workspace_;
  SetRotation rotation_;
  std::optional<Verifier> verifier_;
};

}  // namespace fftune
