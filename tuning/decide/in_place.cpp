#include "tuning/decide/in_place.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "measure/statistics.hpp"
#include "tuning/search/cover.hpp"

namespace fftune {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// A group's choices are its variants within this of its fastest, timed by themselves. The
/// neighbours change the launch and the contents of the caches, which are the smaller part of a
/// time.
constexpr double choice_band = 1.3;
constexpr std::size_t most_close = 12;

constexpr int most_rounds = 3;
/// A look at every choice, then samples of those that are not clearly slower; and how many times as
/// many again while the fastest is not told from the present one.
constexpr int screening_samples = 5;
constexpr double screening_band = 1.02;
constexpr int close_samples = 15;
constexpr int least_samples = 12;
constexpr int most_repeats = 2;

/// Beside the recipe that the rounds end with: times that are close may turn round in the end, and
/// a recipe may prove wrong as a whole.
constexpr std::size_t most_near = 6;

/// The part of the time that is left which may be spent; the rest is for the verdict.
constexpr double descent_share = 0.6;

/// The fastest by themselves, and the fastest of every other family.
std::vector<Part> close_choices(const VariantGroup& group, std::size_t place) {
  auto indices = group.timed();
  std::stable_sort(indices.begin(), indices.end(),
                   [&](auto a, auto b) { return group.median_us(a) < group.median_us(b); });
  std::vector<Part> choices;
  for (const auto index : indices) {
    const bool close = choices.size() < most_close &&
                       group.median_us(index) <= group.median_us(indices.front()) * choice_band;
    const bool new_family = std::none_of(choices.begin(), choices.end(), [&](const Part& choice) {
      return group.variants()[choice.variant].family == group.variants()[index].family;
    });
    if (close || new_family) choices.push_back({place, index, group.median_us(index)});
  }
  return choices;
}

/// A recipe and its samples, taken in turn with those of the present one.
struct Contender {
  Combination combination;
  std::vector<double> samples_us;
  Summary ratio{0, infinity, infinity, infinity};  // of its time to the present recipe's
};

class Descent {
 public:
  Descent(Session& session, const std::vector<Searched>& groups)
      : session_(session),
        groups_(groups),
        stage_count_(session.op().stages(session.problem()).size()),
        deadline_(session.seconds() + session.seconds_left() * descent_share) {
    for (std::size_t i = 0; i < groups.size(); ++i)
      choices_.push_back(close_choices(*groups[i].group, i));
  }

  std::vector<Combination> run() {
    const auto first = cover(0, stage_count_);
    if (!first) return {};
    present_ = *first;
    auto& progress = session_.progress();
    progress.done = 0;
    progress.total = static_cast<int>(stage_count_) * most_rounds;
    bool changed = true;
    for (int round = 0; round < most_rounds && changed; ++round) {
      changed = false;
      for (std::size_t stage = 0; stage < stage_count_ && !stopped(); ++stage) {
        changed |= contest(stage);
        ++progress.done;
        session_.tell();
      }
    }
    return finalists(*first);
  }

 private:
  const Span& span(const Part& part) const { return groups_[part.group].group->span(); }

  bool stopped() const {
    return session_.seconds() >= deadline_ || !session_.stop_reason().empty();
  }

  /// The choices that cover these stages in the least time by themselves.
  std::optional<Combination> cover(std::size_t begin, std::size_t end) const {
    std::vector<Piece> fastest;
    for (std::size_t i = 0; i < groups_.size(); ++i)
      fastest.push_back({groups_[i].group->span(),
                         choices_[i].empty() ? infinity : choices_[i].front().median_us});
    const Cover least = least_cover(fastest, {begin, end - begin});
    if (least.cost == infinity) return {};
    Combination combination{.parts = {}, .sum_us = least.cost};
    for (const auto place : least.pieces) combination.parts.push_back(choices_[place].front());
    return combination;
  }

  /// The present recipe with this choice in it; nothing if the stages beside it that lose their
  /// variant cannot be covered.
  std::optional<Combination> with(const Part& choice) const {
    const std::size_t begin = span(choice).first_stage;
    const std::size_t end = begin + span(choice).stage_count;
    Combination before, behind;
    std::size_t open = begin, closed = end;  // what has to be covered anew
    for (const auto& part : present_.parts) {
      const std::size_t first = span(part).first_stage, last = first + span(part).stage_count;
      if (last <= begin)
        before.parts.push_back(part);
      else if (first >= end)
        behind.parts.push_back(part);
      else
        open = std::min(open, first), closed = std::max(closed, last);
    }
    const auto left = cover(open, begin), right = cover(end, closed);
    if (!left || !right) return {};
    Combination all = std::move(before);
    for (const auto* more : {&left->parts, &right->parts, &std::as_const(behind.parts)}) {
      if (more == &right->parts) all.parts.push_back(choice);
      all.parts.insert(all.parts.end(), more->begin(), more->end());
    }
    for (const auto& part : all.parts) all.sum_us += part.median_us;
    return all;
  }

  Candidate candidate(const Combination& combination) const {
    Candidate candidate;
    for (const auto& part : combination.parts)
      candidate.recipe.push_back(groups_[part.group].group->variants()[part.variant]);
    return candidate;
  }

  /// Adds samples to each, in turn. Contenders that cannot be timed keep no ratio.
  void time(std::vector<Contender>& all, int count) {
    Candidates candidates;
    for (const auto& contender : all) candidates.push_back(candidate(contender.combination));
    session_.launch(candidates);
    TimeRequest request;
    request.samples = count;
    request.seconds = std::clamp((deadline_ - session_.seconds()) * 0.2, 0.05, 3.0);
    const auto timings = session_.evaluator().time(candidates, request);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Timing& timing = timings[i];
      if (!timing.failure.empty()) {
        Outcome outcome;
        outcome.id = candidates[i].id();
        outcome.kind = timing.device_fault ? OutcomeKind::device_fault
                       : timing.fatal      ? OutcomeKind::crashed
                                           : OutcomeKind::launch_failed;
        outcome.reason = timing.failure;
        session_.record("", outcome);
      }
      auto& own = all[i].samples_us;
      own.insert(own.end(), timing.samples_us.begin(), timing.samples_us.end());
      const auto& present = all.front().samples_us;
      std::vector<double> ratios;
      for (std::size_t at = 0; at < std::min(own.size(), present.size()); ++at)
        ratios.push_back(own[at] / present[at]);
      all[i].ratio = Summary{0, infinity, infinity, infinity};
      if (timing.failure.empty() && !ratios.empty()) all[i].ratio = summarise(ratios);
    }
  }

  /// Times the choices of the groups that begin at the stage, each in the present recipe; returns
  /// whether one replaces it.
  bool contest(std::size_t stage) {
    std::vector<Contender> all{{present_, {}}};
    for (const auto& choices : choices_)
      for (const auto& choice : choices) {
        if (span(choice).first_stage != stage) continue;
        auto other = with(choice);
        if (other && !same(*other, present_)) all.push_back({std::move(*other), {}});
      }
    if (all.size() == 1) return false;
    time(all, screening_samples);
    all.erase(std::remove_if(
                  all.begin() + 1, all.end(),
                  [](const Contender& other) { return !(other.ratio.median <= screening_band); }),
              all.end());
    const auto faster = [](const Contender& a, const Contender& b) {
      return a.ratio.median < b.ratio.median;
    };
    for (int taken = 0; all.size() > 1 && taken <= most_repeats && !stopped(); ++taken) {
      time(all, close_samples);
      const Summary best = std::min_element(all.begin() + 1, all.end(), faster)->ratio;
      if (best.high < 1 || best.median >= 1) break;
    }
    if (all.size() == 1) return false;
    std::stable_sort(all.begin() + 1, all.end(), faster);
    const double best = std::min(all[1].ratio.median, 1.0);
    const bool replaced = all[1].ratio.samples >= least_samples && all[1].ratio.high < 1;
    if (replaced) {
      near_.clear();
      std::swap(present_, all[1].combination);
    }
    for (std::size_t i = 1; i < all.size(); ++i) {
      all[i].combination.sum_us = replaced && i == 1 ? 1 / best : all[i].ratio.median / best;
      near_.push_back(std::move(all[i].combination));
    }
    return replaced;
  }

  /// The present recipe, those near it, nearest first, and the one that it began with.
  std::vector<Combination> finalists(const Combination& first) {
    std::stable_sort(near_.begin(), near_.end(), [](const Combination& a, const Combination& b) {
      return a.sum_us < b.sum_us;
    });
    std::vector<Combination> all{present_};
    const auto add = [&](const Combination& other) {
      if (std::none_of(all.begin(), all.end(),
                       [&](const Combination& known) { return same(known, other); }))
        all.push_back(other);
    };
    for (const auto& other : near_)
      if (all.size() <= most_near) add(other);
    add(first);
    return all;
  }

  Session& session_;
  const std::vector<Searched>& groups_;
  const std::size_t stage_count_;
  const double deadline_;
  std::vector<std::vector<Part>> choices_;  // of each group, the fastest first
  Combination present_;
  /// Timed as about as fast as the present recipe; sum_us is their time by its.
  std::vector<Combination> near_;
};

}  // namespace

bool is_tuned_in_place(const Session& session) {
  return !session.op().parts(session.problem()).empty();
}

std::vector<Combination> tuned_in_place(Session& session, const std::vector<Searched>& groups) {
  return Descent(session, groups).run();
}

}  // namespace fftune
