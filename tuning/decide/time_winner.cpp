#include "tuning/decide/verdict.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "registry/catalog.hpp"
#include "tuning/decide/merged_texts.hpp"

namespace fftune {
namespace {

constexpr int verdict_samples = 32;
constexpr int most_attempts = 3;
/// From one timing to the next; less is the device's own breathing.
constexpr double most_drift = 0.03;

Candidates winner_and_others(Session& session, const EndToEnd& winner,
                             const std::vector<EndToEnd>& rivals) {
  Candidates candidates{winner.candidate};
  for (const EndToEnd& rival : rivals) candidates.push_back(rival.candidate);
  if (session.options().baselines && !session.cancelled())
    for (const auto& baseline :
         session.op().baselines(session.problem(), session.evaluator().facts()))
      candidates.push_back({0, {}, baseline.name});
  return candidates;
}

/// Empty if it did not drift, or no more than its noise.
std::string drift_text(const Summary& before, const Summary& now) {
  if (!(before.median > 0)) return "";
  const double drift = now.median / before.median - 1;
  const bool apart = now.low > before.high || before.low > now.high;
  if (!apart || std::abs(drift) <= most_drift) return "";
  return fmt::format("the winner's own time drifts by {:+.1f}%", 100 * drift);
}

/// The baselines are behind `others`.
void take_baselines(const Candidates& candidates, const std::vector<BurstTiming>& timings,
                    std::size_t others, Verdict& verdict, TuneResult& result) {
  result.baselines.clear();
  for (std::size_t i = others; i < candidates.size(); ++i) {
    if (!timings[i].last.failure.empty() || timings[i].bursts.empty()) {
      result.notes.push_back(fmt::format("the baseline '{}' could not be timed: {}",
                                         candidates[i].baseline, timings[i].last.failure));
      continue;
    }
    const std::string& name = candidates[i].baseline;
    result.baselines.push_back({name, median(timings[i].samples_us())});
    result.ratios[name] = ratio_of(timings[i].bursts, timings.front().bursts);
  }
  // "unfused" by name: the baseline of verdict.unfused_ratio.
  if (const auto unfused = result.ratios.find("unfused"); unfused != result.ratios.end())
    verdict.unfused_ratio = unfused->second.is_known() ? unfused->second.median : 0;
}

void add_new(std::vector<std::string>& all, const std::vector<std::string>& more) {
  for (const auto& text : more)
    if (std::find(all.begin(), all.end(), text) == all.end()) all.push_back(text);
}

}  // namespace

std::optional<double> untuned_ratio(Session& session, const EndToEnd& winner,
                                    const std::vector<EndToEnd>& contenders,
                                    const std::vector<Searched>& groups) {
  if (!session.options().baselines) return std::nullopt;
  const Recipe untuned =
      default_recipe(session.op(), session.problem(), session.evaluator().facts());
  if (untuned == winner.candidate.recipe) return 1;
  const auto contender =
      std::find_if(contenders.begin(), contenders.end(),
                   [&](const EndToEnd& other) { return other.candidate.recipe == untuned; });
  if (contender != contenders.end())
    return ratio_of({contender->samples_us}, {winner.samples_us}).median;
  if (!are_measured(untuned, groups)) return std::nullopt;
  const std::vector<Candidate> both{winner.candidate, {0, untuned, ""}};
  TimeRequest request;
  request.samples = verdict_samples;
  request.seconds = std::clamp(session.seconds_left() * 0.2, 0.2, 2.0);
  session.launch(both);
  const auto timings = session.evaluator().time(both, request);
  for (const Timing& timing : timings)
    if (!timing.failure.empty() || timing.samples_us.empty()) return std::nullopt;
  return ratio_of({timings[1].samples_us}, {timings[0].samples_us}).median;
}

bool time_winner(Session& session, const EndToEnd& winner, const std::vector<EndToEnd>& rivals,
                 Summary before, Verdict& verdict, std::vector<Ratio>& ratios, TuneResult& result) {
  const auto candidates = winner_and_others(session, winner, rivals);
  std::vector<BurstTiming> timings;
  for (int attempt = 1;; ++attempt) {
    verdict.disturbances = session.settle();
    // It was there for as long as patience lasted: measuring again would not help.
    const bool stays = !verdict.disturbances.empty();
    TimeRequest request;
    request.samples = verdict_samples;
    request.seconds =
        session.cancelled() ? 0.3 : std::clamp(session.seconds_left() * 0.5, 0.3, 3.0);
    session.launch(candidates);
    auto plan = session.options().bursts(session.evaluator().facts().kind, request.seconds);
    plan.sleep = session.options().sleep;
    timings = time_in_bursts(session.evaluator(), candidates, request, plan);
    const auto& own = timings.front();
    if (!own.last.failure.empty() || own.bursts.empty()) {
      result.notes.push_back(
          fmt::format("{} could not be timed: {}", winner.candidate.id(),
                      own.last.failure.empty() ? "no samples" : own.last.failure));
      return false;
    }
    const auto now = summarise_bursts(own.bursts);
    add_new(verdict.disturbances, session.evaluator().disturbances());
    if (const auto drift = drift_text(before, now); !drift.empty())
      add_new(verdict.disturbances, {drift});
    verdict.median_us = now.median;
    verdict.interval_low_us = now.low;
    verdict.interval_high_us = now.high;
    verdict.noise = noise_floor_of_bursts(own.bursts);
    if (verdict.disturbances.empty() || attempt == most_attempts || stays) break;
    if (!session.stop_reason().empty()) break;
    before = now;
  }
  std::vector<std::string> disturbances;
  for (MergedText& each : merged_texts(verdict.disturbances))
    disturbances.push_back(std::move(each.text));
  if (!disturbances.empty())
    result.notes.push_back(
        fmt::format("measured while disturbed: {}", fmt::join(disturbances, ", ")));
  constexpr double never = std::numeric_limits<double>::infinity();
  ratios.assign(rivals.size(), {never, never, never});
  for (std::size_t i = 0; i < rivals.size(); ++i)
    if (const BurstTiming& own = timings[1 + i]; own.last.failure.empty() && !own.bursts.empty())
      ratios[i] = ratio_of(own.bursts, timings.front().bursts);
  take_baselines(candidates, timings, 1 + rivals.size(), verdict, result);
  return true;
}

}  // namespace fftune
