#include "tuning/decide/verdict.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "measure/statistics.hpp"
#include "registry/catalog.hpp"
#include "tuning/decide/end_to_end.hpp"
#include "tuning/decide/in_place.hpp"
#include "tuning/search/enumerate.hpp"

namespace fftune {
namespace {

/// Combinations within this of the least sum of stage medians are timed end to end. The sum is
/// wrong by the cache state that stages leave each other and by the overlap of programmatic
/// dependent launches; both together are less than this.
constexpr double combination_band = 1.25;
constexpr std::size_t most_combinations = 16;

/// The winner is the variant of fewest registers among those within this part of the tie band of
/// the fastest: so the winners of two searches are nearer each other than the band.
constexpr double preferred_part = 0.4;

/// Times the winner is chosen again because of a contradiction.
constexpr int most_choices = 3;

/// Adds the fastest variant of every family that has no choice yet: how stages affect each other
/// shows only when they are timed together.
void add_other_families(const VariantGroup& group, std::size_t place, GroupChoices& result) {
  auto indices = group.timed();
  std::sort(indices.begin(), indices.end(),
            [&](auto a, auto b) { return group.median_us(a) < group.median_us(b); });
  for (const auto index : indices) {
    const auto& family = group.variants()[index].family;
    const bool present = std::any_of(
        result.choices.begin(), result.choices.end(),
        [&](const auto& choice) { return group.variants()[choice.variant].family == family; });
    if (!present) result.choices.push_back({place, index, group.median_us(index)});
  }
}

/// The winner by the tie-break, the fastest, the next by preference, and the best of each other
/// family.
GroupChoices choices_of(const Searched& searched, std::size_t place, double tie_band,
                        std::size_t stage_count) {
  const VariantGroup& group = *searched.group;
  const auto indices = deciders(searched);
  GroupChoices result{group.span(), {}};
  if (indices.empty()) return result;
  const auto all = finalists_of(group, indices);
  auto order = by_preference(all, tie_band);
  const auto fastest = std::min_element(order.begin(), order.end(), [&](auto a, auto b) {
    return all[a].median_us < all[b].median_us;
  });
  if (fastest != order.begin()) std::rotate(order.begin() + 1, fastest, fastest + 1);
  // A group that covers the whole op was timed end to end already: its winner stands.
  order.resize(
      std::min<std::size_t>(order.size(), group.span().stage_count == stage_count ? 1 : 3));
  for (const auto at : order) result.choices.push_back({place, indices[at], all[at].median_us});
  if (group.span().stage_count != stage_count) add_other_families(group, place, result);
  return result;
}

/// The recipe's place in the list, to which it is added unless it is there; null if its variants
/// are not in the groups.
Combination* add_present(const std::optional<Combination>& present, std::vector<Combination>& all) {
  if (!present) return nullptr;
  auto known = std::find_if(all.begin(), all.end(),
                            [&](const Combination& other) { return same(other, *present); });
  if (known == all.end()) known = all.insert(known, *present);
  return &*known;
}

/// The times of the last end-to-end measurement; zeros if there is none.
Summary last_timing(const std::vector<Searched>& groups, const EndToEnd& contender) {
  if (std::isfinite(contender.median_us))
    return {0, contender.median_us, contender.low_us, contender.high_us};
  if (contender.combination.parts.size() != 1) return {};
  const auto& part = contender.combination.parts.front();
  const auto& outcome = groups[part.group].group->outcome(part.variant);
  return {outcome.samples, outcome.median_us, outcome.low_us, outcome.high_us};
}

/// `equals`: rivals that the times of the record cannot tell from the winner.
void take_stages(const Session& session, const std::vector<Searched>& groups,
                 const EndToEnd& winner, const std::vector<Combination>& equals,
                 PresetRecord& record) {
  record.stages.clear();
  for (const auto& part : winner.combination.parts)
    record.stages.push_back(stage_record(session, groups[part.group], part.variant));
  if (record.stages.size() != 1) return;
  StageRecord& stage = record.stages.front();
  const Part& own = winner.combination.parts.front();
  for (const Combination& other : equals) {
    if (other.parts.size() != 1 || other.parts.front().group != own.group) continue;
    const Outcome& outcome = groups[own.group].group->outcome(other.parts.front().variant);
    const auto is_it = [&](const Timed& timed) { return timed.id == outcome.id; };
    std::erase_if(stage.runners_up, is_it);
    if (std::none_of(stage.ties.begin(), stage.ties.end(), is_it))
      stage.ties.push_back({outcome.id, outcome.median_us, outcome.bits});
  }
}

/// The fastest sums of variants timed by themselves.
std::vector<Combination> combinations_of(const Session& session,
                                         const std::vector<Searched>& groups,
                                         std::size_t stage_count) {
  std::vector<GroupChoices> choices;
  for (std::size_t i = 0; i < groups.size(); ++i)
    choices.push_back(
        choices_of(groups[i], i, preferred_part * session.options().tie_band, stage_count));
  return combine(choices, stage_count, combination_band, most_combinations);
}

/// Reports the gain of timing in place over the recipe `apart` of the variants that are fastest by
/// themselves.
void tell_gain(const Combination& apart, const std::vector<EndToEnd>& contenders,
               const EndToEnd& winner, TuneResult& result) {
  for (const auto& contender : contenders)
    if (same(contender.combination, apart) && std::isfinite(contender.median_us) &&
        contender.median_us > winner.median_us)
      result.notes.push_back(fmt::format(
          "timed within the whole, its parts take {} µs; those that are fastest by themselves "
          "take {}",
          note_microseconds(winner.median_us), note_microseconds(contender.median_us)));
}

/// Whether the confidence intervals separate the best of every group, and the best end-to-end
/// candidate, from everything outside of the tie band; where they do not, a note says so.
bool is_decided(const Session& session, const std::vector<Searched>& groups,
                const std::vector<EndToEnd>& contenders, const PresetRecord& record,
                TuneResult& result) {
  const Verdict& verdict = record.verdict;
  const double band = session.options().tie_band;
  bool decided = true;
  // A GPU is one process's alone: what moves its times is its clock, alike for all that is timed in
  // turns.
  bool in_turns = session.evaluator().facts().kind == DeviceKind::cuda;
  const auto doubt = [&](const std::string& why) {
    decided = false;
    result.notes.push_back("undecided: " + why);
  };
  const auto look = [&](const std::string& what, const TieSet& ties) {
    in_turns = in_turns && ties.in_turns;
    if (ties.unresolved > 0)
      doubt(fmt::format("{} of the {} beyond the tie band cannot be told from the fastest",
                        ties.unresolved, what));
    else if (ties.spread > band)
      doubt(fmt::format("the {} that are tied may differ by {:.1f}%", what, 100 * ties.spread));
  };
  for (const auto& searched : groups) {
    const std::string advice = "before the time was spent: a longer --budget helps";
    if (searched.group->hardly_begun())
      doubt(fmt::format("only {} were tried {}", searched.group->extent(), advice));
    else if (const auto untried = searched.group->untried_families(); !untried.empty())
      doubt(fmt::format("only the default of {} was tried {}", fmt::join(untried, " or "), advice));
  }
  const bool in_place = is_tuned_in_place(session);
  for (const auto& searched : groups)
    if (!in_place && !searched.finalists.empty())
      look("variants of " + searched.group->name(),
           tied(finalists_of(*searched.group, deciders(searched)), band));
  if (contenders.size() > 1) look("end-to-end candidates", tied(finalists_of(contenders), band));
  // In place the times of stages by themselves decide nothing.
  if (!in_place)
    for (const auto& contradiction : contradictions(record)) doubt(contradiction);
  if (verdict.noise > band && !in_turns) doubt(noise_words(verdict.noise, band));
  return decided;
}

/// Adds the combinations that are timed end to end whatever their stages take by themselves: the
/// recipes on record and the untuned choice, so that the new winner is never slower. That they were
/// timed before, with other variants, says little of a machine that was busy then or is now.
void add_expected(Session& session, const std::vector<Searched>& groups,
                  std::vector<Combination>& combinations) {
  const DeviceFacts& facts = session.evaluator().facts();
  const auto add = [&](const Recipe& named) -> Combination* {
    const Recipe recipe = completed(session.op(), session.problem(), facts, named);
    if (!are_measured(recipe, groups)) return nullptr;
    return add_present(combination_of(recipe, groups), combinations);
  };
  for (const Recipe& recipe : recipes_on_record(session))
    if (auto* const added = add(recipe)) added->on_record = true;
  if (auto* const added = add(default_recipe(session.op(), session.problem(), facts)))
    added->expected = true;
}

/// The contenders that the winner must not be slower than.
std::vector<EndToEnd> rivals_of(const EndToEnd& winner, const std::vector<EndToEnd>& contenders) {
  std::vector<EndToEnd> rivals;
  for (const EndToEnd& other : contenders)
    if ((other.combination.expected || other.combination.on_record) &&
        !same(other.combination, winner.combination))
      rivals.push_back(other);
  return rivals;
}

/// Whether a rival with this ratio takes the winner's place: beyond the interval, and by more than
/// a printed ratio shows, so that equal ones do not change places from search to search.
bool is_faster(const Ratio& ratio) {
  return ratio.high < 1 && ratio.median < 0.995;
}

/// Times the winner as its record states it. A rival that these times show to be faster, beyond
/// their intervals, becomes the winner, and is timed likewise: without a record, or with the one
/// that is there, it would run. `equals`: rivals that may be as fast. False if the winner could not
/// be timed.
bool time_against_rivals(Session& session, EndToEnd& winner, Summary before,
                         const std::vector<EndToEnd>& contenders,
                         const std::vector<Searched>& groups, Verdict& verdict,
                         std::vector<Combination>& equals, TuneResult& result) {
  std::vector<EndToEnd> rivals = rivals_of(winner, contenders);
  while (true) {
    std::vector<Ratio> ratios;
    if (!time_winner(session, winner, rivals, before, verdict, ratios, result)) return false;
    const auto slower_than = std::find_if(ratios.begin(), ratios.end(), is_faster);
    if (slower_than == ratios.end()) {
      for (std::size_t i = 0; i < rivals.size(); ++i) {
        if (!std::isfinite(ratios[i].median)) continue;
        if (rivals[i].combination.expected) {
          result.ratios["untuned"] = ratios[i];
          verdict.untuned_ratio =
              ratios[i].is_known() ? std::optional(ratios[i].median) : std::nullopt;
        }
        if (ratios[i].low <= 1 + session.options().tie_band)
          equals.push_back(rivals[i].combination);
      }
      return true;
    }
    const std::size_t place = static_cast<std::size_t>(slower_than - ratios.begin());
    const EndToEnd faster = rivals[place];
    const bool untuned = faster.combination.expected;
    result.notes.push_back(fmt::format(
        "the search's choice, {}, takes {:.3g} times as long as {}, which is the winner",
        winner.candidate.id(), 1 / slower_than->median,
        untuned ? "the untuned choice" : "the variant on record"));
    rivals.erase(rivals.begin() + static_cast<std::ptrdiff_t>(place));
    winner = faster;
    before = last_timing(groups, winner);
    verdict.untuned_ratio = untuned_ratio(session, winner, contenders, groups);
  }
}

/// Adds to the record what stands beside the winner's stages and times: the limit, whether the
/// result is decided, errors and origin.
void complete(PresetRecord& record, Session& session, const std::vector<Searched>& groups,
              const std::vector<EndToEnd>& contenders, const EndToEnd& winner, TuneResult& result) {
  const std::size_t stage_count = session.op().stages(session.problem()).size();
  const double floor = session.floor_us(0, stage_count);
  record.verdict.roofline_fraction = floor / record.verdict.median_us;
  record.verdict.limit = session.limit();
  if (record.verdict.roofline_fraction > most_share_of_limit)
    result.notes.push_back(beyond_limit(session.op(), session.problem(),
                                        session.evaluator().facts(), record.verdict.limit));
  record.verdict.strategy = session.options().strategy;
  record.verdict.decided = is_decided(session, groups, contenders, record, result);
  record.error = winner.verified.error;
  record.tolerance = winner.verified.tolerance;
  record.provenance = provenance_now(session.evaluator().facts(), session.options().seed);
}

}  // namespace

std::string note_microseconds(double microseconds) {
  return microseconds < 1000 ? fmt::format("{:.4g}", microseconds)
                             : fmt::format("{:.0f}", microseconds);
}

std::string noise_words(double noise, double tie_band) {
  // Half of the median and more is no floor: the machine did something else for a while.
  if (noise > 0.5)
    return "the winner's own times differ by more than half of themselves: the machine was busy";
  return fmt::format("the noise floor of {:.1f}% is above the tie band of {:.1f}%", 100 * noise,
                     100 * tie_band);
}

std::string beyond_limit(const Op& op, const Problem& problem, const DeviceFacts& facts,
                         const std::string& limit) {
  const double bytes = cost_of(op, problem).bytes;
  const auto cache = static_cast<double>(facts.l2_bytes);
  constexpr double mib = 1 << 20;
  if (limit == "memory" && bytes <= cache)
    return fmt::format(
        "faster than memory allows, because its tensors ({:.3g} MiB) stay in the cache ({:.3g} "
        "MiB): the limit holds for data in memory",
        bytes / mib, cache / mib);
  return fmt::format(
      "faster than the measured limit of {}: the limit was measured while the machine was busy or "
      "its clock low, so measure again on a quiet machine",
      limit);
}

bool are_measured(const Recipe& recipe, const std::vector<Searched>& groups) {
  return std::all_of(recipe.begin(), recipe.end(), [&](const Variant& variant) {
    return std::any_of(groups.begin(), groups.end(), [&](const Searched& searched) {
      const auto timed = searched.group->timed();
      return std::any_of(timed.begin(), timed.end(), [&](std::size_t index) {
        return searched.group->variants()[index] == variant;
      });
    });
  });
}

bool have_cover(const std::vector<Searched>& groups, std::size_t stage_count) {
  std::vector<Span> spans;
  for (const auto& searched : groups)
    if (!searched.group->timed().empty()) spans.push_back(searched.group->span());
  return covers(spans, stage_count);
}

void conclude(Session& session, std::vector<Searched> groups, TuneResult& result) {
  if (!session.evaluator().lost().empty()) return;
  const bool in_place = is_tuned_in_place(session);
  if (!in_place) repeat_contradicted_finals(session, groups);
  const std::size_t stage_count = session.op().stages(session.problem()).size();
  auto& progress = session.progress();
  progress.phase = Phase::combine;
  progress.group.clear();

  const double preferred = preferred_part * session.options().tie_band;
  const double tie_band = in_place ? std::min(in_place_tie_band, preferred) : preferred;
  PresetRecord record;
  record.problem = session.problem();
  std::vector<EndToEnd> contenders;
  std::optional<EndToEnd> winner;
  const std::size_t notes = result.notes.size();
  for (int choice = 1;; ++choice) {
    auto combinations =
        in_place ? tuned_in_place(session, groups) : combinations_of(session, groups, stage_count);
    const Combination apart = combinations.empty() ? Combination{} : combinations.back();
    add_expected(session, groups, combinations);

    progress.done = 0;
    progress.total = static_cast<int>(combinations.size());
    session.tell();

    contenders = verified_end_to_end(session, groups, combinations, contenders, result);
    time_end_to_end(session, contenders, result);
    if (contenders.empty()) {
      if (!combinations.empty())
        result.notes.push_back("no end-to-end candidate worked: see the outcomes");
      return;
    }
    const EndToEnd& best = contenders[by_preference(finalists_of(contenders), tie_band).front()];
    if (in_place) tell_gain(apart, contenders, best, result);

    const bool stands = winner && same(winner->combination, best.combination);
    const Summary before = stands ? Summary{.samples = 0,
                                            .median = record.verdict.median_us,
                                            .low = record.verdict.interval_low_us,
                                            .high = record.verdict.interval_high_us}
                                  : last_timing(groups, best);
    winner = best;
    record.verdict.untuned_ratio = untuned_ratio(session, *winner, contenders, groups);
    std::vector<Combination> equals;
    if (!time_against_rivals(session, *winner, before, contenders, groups, record.verdict, equals,
                             result))
      return;
    take_stages(session, groups, *winner, equals, record);
    if (in_place || choice == most_choices || !session.stop_reason().empty()) break;
    if (contradictions(record).empty()) break;
    repeat_finals(session, groups);
    result.notes.resize(notes);
  }
  complete(record, session, groups, contenders, *winner, result);

  progress.best_us = record.verdict.median_us;
  progress.best_id = winner->candidate.id();
  progress.roofline = record.verdict.roofline_fraction;
  result.record = std::move(record);
}

}  // namespace fftune
