// A group: the variants of all families that cover the same stages, and the search among them.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "measure/statistics.hpp"
#include "tuning/evaluate/evaluator.hpp"
#include "tuning/journal/outcome.hpp"
#include "tuning/search/session.hpp"
#include "tuning/strategies/search.hpp"

namespace fftune {

/// The variants of one span.
struct GroupSpec {
  Span span;
  std::vector<Variant> variants;  // warm starts first
  std::size_t warm_starts = 0;
};

class VariantGroup : public Search {
 public:
  VariantGroup(Session& session, GroupSpec spec);

  const Span& span() const { return spec_.span; }
  /// "gate_up+down".
  const std::string& name() const { return name_; }
  const Outcome& outcome(std::size_t index) const { return entries_[index].outcome; }
  /// In the order in which they were taken.
  std::span<const double> samples_us(std::size_t index) const { return entries_[index].samples; }
  bool is_compiled(std::size_t index) const { return entries_[index].compiled; }
  /// Whether their samples were taken in turns.
  bool in_turns(std::size_t a, std::size_t b) const { return entries_[a].turn == entries_[b].turn; }
  /// Those that were timed, in the order of their indices.
  std::vector<std::size_t> timed() const;
  /// Starts the search in depth: it may take this long.
  void set_share(double seconds) {
    began_ = session_.seconds();
    deadline_ = began_ + seconds;
  }
  /// The worth of a gain of this group to the op.
  struct Standing {
    double least_us;   // a gain below this does not count
    double others_us;  // that other groups take for these stages; infinity if they cannot
  };
  void set_standing(const Standing& standing) { standing_ = standing; }
  bool was_cut_short() const { return cut_short_; }
  /// Whether its search ended after too few variants to say anything about the others.
  bool hardly_begun() const;
  /// Families, fallbacks aside, that were tried with no variant but their default, which was not
  /// far behind the best, where time ended the search.
  std::vector<std::string> untried_families() const;
  /// How many were tried, for people: "26 of 197 variants of gate_up".
  std::string extent() const;
  int count(OutcomeKind kind) const;
  /// How many were tried and the gain that its strategy still expects; empty if it gave no
  /// expectation.
  std::string outlook() const;
  /// Marks them and writes their final times to the journal.
  void record_finalists(const std::vector<std::size_t>& indices);

  const Problem& problem() const override { return session_.problem(); }
  const DeviceFacts& facts() const override { return session_.evaluator().facts(); }
  std::uint64_t seed() const override { return session_.options().seed; }
  const std::vector<Variant>& variants() const override { return spec_.variants; }
  std::size_t warm_starts() const override { return spec_.warm_starts; }
  double predicted_us(std::size_t index) const override;
  std::vector<double> traits(std::size_t index) const override;
  void compile(const std::vector<std::size_t>& indices) override;
  /// Compiles variants of several groups side by side: a few of each leave most cores idle.
  static void compile_together(
      const std::vector<std::pair<VariantGroup*, std::vector<std::size_t>>>& wanted);
  void screen(std::size_t index, double abandon_us) override;
  std::size_t workers() const override { return session_.evaluator().workers(); }
  std::vector<std::size_t> screen_all(const std::vector<std::size_t>& indices, double band,
                                      int samples) override;
  void measure(const std::vector<std::size_t>& indices, int samples, double seconds) override;
  void forget(const std::vector<std::size_t>& indices) override;
  double median_us(std::size_t index) const override;
  bool undecided(const std::vector<std::size_t>& indices) const override;
  double best_us() const override { return best_us_; }
  bool stopped() const override;
  bool enough() const override { return !enough_({0, tried_}).empty(); }
  void cut_short() override { cut_short_ = true; }
  void expect_gain(double gain) override;
  double least_gain() const override;
  double seconds_left() const override;
  void enter(Phase phase, std::size_t total) override;

 private:
  struct Entry {
    Outcome outcome;
    std::string source_hash;
    std::vector<double> samples;
    int turn = 0;           // the same for those whose samples were taken in turns
    bool stale = false;     // samples to be replaced by the next ones
    bool compiled = false;  // by this session
    bool verified = false;
    bool from_journal = false;
    bool compile_counted = false;  // towards the progress
    bool screen_counted = false;
  };

  Candidate candidate(std::size_t index) const;
  void take_compiled(std::size_t index, const Compiled& compiled);
  /// Whether it passed.
  bool take_verified(std::size_t index, const Verified& verified);
  void take_screened(std::size_t index, const Timing& timing);
  void take_timing(std::size_t index, const Timing& timing);
  void recall(std::size_t index);
  void fail(std::size_t index, OutcomeKind kind, const std::string& reason, bool fatal = false);
  /// Compiles and verifies; false if that failed, now or before.
  bool ready(std::size_t index);
  /// Call after the median of `index` has changed.
  void update_best(std::size_t index);
  void show_best();
  void count_compile(std::size_t index);
  void count_screen(std::size_t index);

  Session& session_;
  GroupSpec spec_;
  std::string name_;
  std::string required_bits_;  // hash that a winner must have; empty: any
  double floor_us_;
  double deadline_;
  std::vector<Entry> entries_;
  std::size_t best_ = 0;
  double best_us_;
  std::optional<Standing> standing_;
  StopRule enough_;
  int tried_ = 0;
  int turn_ = 0;
  int compile_counted_ = 0;
  int screen_counted_ = 0;
  bool cut_short_ = false;
  std::optional<double> gain_;  // expected of those not tried
  double began_ = 0;            // when the search in depth began
  double spent_ = 0;            // on it, when the gain was last told
};

/// A group after its search.
struct Searched {
  VariantGroup* group = nullptr;
  std::vector<std::size_t> finalists;  // measured alike; empty if the search did not get that far
};

/// These, as what statistics.hpp compares, in the order of `indices`.
std::vector<Finalist> finalists_of(const VariantGroup& group,
                                   const std::vector<std::size_t>& indices);

}  // namespace fftune
