// The session of one problem: the state that its groups share: clock, stop rules, counts and
// progress.
#pragma once

#include <compare>
#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "registry/catalog.hpp"
#include "registry/op.hpp"
#include "tuning/evaluate/evaluator.hpp"
#include "tuning/journal/outcome.hpp"
#include "tuning/search/options.hpp"

namespace fftune {

/// Consecutive stages of an op.
struct Span {
  std::size_t first_stage = 0;
  std::size_t stage_count = 0;
  auto operator<=>(const Span&) const = default;
};

class Session {
 public:
  Session(const Catalog& catalog, const Op& op, Evaluator& evaluator, const Problem& problem,
          const TuneOptions& options, SweepPosition position);

  const Catalog& catalog() const { return catalog_; }
  const Op& op() const { return op_; }
  const Problem& problem() const { return problem_; }
  const TuneOptions& options() const { return options_; }
  Evaluator& evaluator() { return evaluator_; }
  const Evaluator& evaluator() const { return evaluator_; }

  /// Measures the ceilings, then makes buffers and reference ready. Throws Error(unavailable) with
  /// the evaluator's words if the problem is refused.
  void prepare();
  /// The buffers that prepare() made.
  const Setup& setup() const { return setup_; }
  /// Sets the stop rules; `budget_seconds` counts from the construction of the session.
  void set_budget(double budget_seconds);

  /// The roofline's floor of a run of stages, in µs: each input read and each output written once.
  double floor_us(std::size_t first_stage, std::size_t stage_count) const;
  /// The term that sets the whole op's floor: "compute" or "memory".
  const char* limit() const;

  double seconds() const;
  double seconds_left() const { return budget_seconds_ - seconds(); }
  bool cancelled() const;
  /// Why to end now; empty: go on.
  std::string stop_reason() const;

  /// Counts an outcome, and writes it to the journal under the hash of its family's sources.
  void record(const std::string& source_hash, const Outcome& outcome);
  /// Writes to the journal that these are about to run.
  void launch(const Candidates& candidates);
  /// Quarantines a variant that crashed (`fatal`), or releases one that ran. Not for end-to-end
  /// candidates.
  void quarantine(const std::string& source_hash, const Outcome& outcome, bool fatal);
  void count_compiled() { ++progress_.compiled; }
  /// From now on only variants whose results have this hash may win the span.
  void require_bits(const Span& span, std::string bits) { required_bits_[span] = std::move(bits); }
  /// Empty: any result.
  std::string required_bits(const Span& span) const {
    const auto found = required_bits_.find(span);
    return found == required_bits_.end() ? "" : found->second;
  }

  /// Waits until nothing disturbs the device, within the options' patience (for the whole session)
  /// and the budget, and returns the disturbances that remain.
  std::vector<std::string> settle();

  /// The longest wait of that kind that may still come.
  double wait_left() const;

  /// For the estimate of the remaining time: the number of variants, and one more of them reached.
  void expect(std::size_t total) { expected_ = total; }
  void count_reached() { ++reached_; }

  /// The progress of the sweep; after a change call tell().
  Progress& progress() { return progress_; }
  void tell();

 private:
  const Catalog& catalog_;
  const Op& op_;
  Evaluator& evaluator_;
  const Problem problem_;
  const TuneOptions& options_;
  std::function<double()> now_;
  double started_;
  double budget_seconds_;
  StopRule stop_;
  std::size_t expected_ = 0;
  std::size_t reached_ = 0;
  double prepared_ = 0;  // when the search proper began
  Limits limits_;
  Setup setup_;
  std::map<Span, std::string> required_bits_;
  double patience_seconds_;
  bool is_disturbed_ = false;  // when that was last asked
  Progress progress_;
};

/// The recipes that a search of the problem must not replace by a slower one: those that are on
/// record, and the one whose bits its winner must have.
std::vector<Recipe> recipes_on_record(const Session& session);

/// The clock of the options, or the steady one.
std::function<double()> clock_of(const TuneOptions& options);

}  // namespace fftune
