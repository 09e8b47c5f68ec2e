#include "tuning/tuner.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "core/error.hpp"
#include "device/lacking.hpp"
#include "tuning/decide/in_place.hpp"
#include "tuning/decide/verdict.hpp"
#include "tuning/search/cover.hpp"
#include "tuning/search/enumerate.hpp"
#include "tuning/search/group.hpp"
#include "tuning/search/session.hpp"
#include "tuning/strategies/strategy.hpp"

namespace fftune {
namespace {

/// The part of the budget that is reserved for end-to-end candidates and baselines.
constexpr double conclusion_share = 0.15;
/// Variants of the lowest predicted time that are tried of each group before any is searched in
/// depth: on a GPU as many as a decided verdict takes, however early the search ends. The cores of
/// a usual host compile them in a few seconds.
constexpr std::size_t promising_on_cpu = 4;
constexpr std::size_t promising_on_gpu = least_tried;
/// A group of few variants needs time for its finals too.
constexpr double group_overhead_variants = 10;
/// One of more variants has no more time: tens of thousands would leave none to the others.
constexpr std::size_t most_weighed = 200;
/// One that takes less of the whole has time as if it took this part.
constexpr double least_part = 0.05;
/// Variants of a family that are tried before any group is searched in depth.
constexpr int enough_of_family = 2;

std::vector<Span> spans_of(const std::vector<GroupSpec>& groups) {
  std::vector<Span> spans;
  for (const auto& group : groups) spans.push_back(group.span);
  return spans;
}

std::vector<GroupSpec> groups_of_only(const Session& session, const std::vector<Variant>& only) {
  auto groups = enumerate_only(session.op(), session.problem(), session.evaluator().facts(), only);
  if (!covers(spans_of(groups), session.op().stages(session.problem()).size()))
    throw Error(ErrorKind::unavailable,
                fmt::format("the record of {} is not feasible any more: search anew",
                            session.problem().text()));
  return groups;
}

/// Whether the op has more than fallbacks for one of these stages on this kind of device, so that
/// it is worth saying that here they alone serve.
bool has_more_than_fallbacks(const Op& op, DeviceKind kind, const std::vector<StageSpec>& stages,
                             const Span& span) {
  for (const Family* family : op.families()) {
    if (family->device_kind() != kind || family->is_fallback()) continue;
    const auto own = family->stages();
    for (std::size_t i = 0; i < span.stage_count; ++i)
      if (std::find(own.begin(), own.end(), stages[span.first_stage + i].name) != own.end())
        return true;
  }
  return false;
}

/// The variant on record comes before all else, so that a search that ends at once does not replace
/// it by a slower one.
WarmStarts warm_starts(const Session& session) {
  const auto& options = session.options();
  WarmStarts first{.on_record = {}, .others = options.try_first};
  for (const Recipe& recipe : recipes_on_record(session))
    first.on_record.insert(first.on_record.end(), recipe.begin(), recipe.end());
  return first;
}

/// The groups to search at first: fallbacks are slow, so they take part only where no other family
/// serves.
std::vector<GroupSpec> groups_of(Session& session, TuneResult& result) {
  const auto& op = session.op();
  const auto& options = session.options();
  if (const auto only = options.only.find(session.problem()); only != options.only.end())
    return groups_of_only(session, only->second);
  const auto& facts = session.evaluator().facts();
  const WarmStarts first = warm_starts(session);
  const auto stages = op.stages(session.problem());
  const std::size_t stage_count = stages.size();
  auto fast = enumerate(op, session.problem(), facts, first, false);
  if (covers(spans_of(fast.groups), stage_count)) return std::move(fast.groups);
  auto slow = enumerate(op, session.problem(), facts, first, true);
  auto needed = fallbacks_needed(spans_of(fast.groups), std::move(slow.groups), stage_count);
  if (std::any_of(needed.begin(), needed.end(), [&](const GroupSpec& group) {
        return has_more_than_fallbacks(op, facts.kind, stages, group.span);
      }))
    result.notes.push_back(
        fmt::format("only a fallback family can serve all of {} on {}, which is slow{}{}",
                    session.problem().text(), facts.name, fast.refusals.empty() ? "" : ": ",
                    fmt::join(fast.refusals, "; ")));
  fast.groups.insert(fast.groups.end(), needed.begin(), needed.end());
  if (!covers(spans_of(fast.groups), stage_count))
    throw Error(ErrorKind::unavailable,
                fmt::format("no family can run {} on {}{}{}", session.problem().text(), facts.name,
                            fast.refusals.empty() ? "" : ": ", fmt::join(fast.refusals, "; ")));
  return std::move(fast.groups);
}

class Tuning {
 public:
  Tuning(Session& session, const Strategy& strategy)
      : session_(session),
        strategy_(strategy),
        stage_count_(session.op().stages(session.problem()).size()),
        promising_(session.evaluator().facts().kind == DeviceKind::cuda ? promising_on_gpu
                                                                        : promising_on_cpu) {}

  void search(std::vector<GroupSpec> specs) {
    const std::size_t begin = groups_.size();
    for (auto& spec : specs) {
      variants_ += spec.variants.size();
      groups_.push_back(std::make_unique<VariantGroup>(session_, std::move(spec)));
      searched_.push_back({groups_.back().get(), {}});
    }
    session_.expect(variants_);
    // The warm starts of every group before any group is searched in depth: from then on there is a
    // result to write, however early the search ends.
    std::vector<std::pair<VariantGroup*, std::vector<std::size_t>>> first;
    for (std::size_t i = begin; i < groups_.size(); ++i)
      first.emplace_back(groups_[i].get(), first_of(*groups_[i]));
    compile_first(first);
    for (const auto& [group, indices] : first) try_first(*group, indices);
    for_in_place_ = session_.seconds_left() * in_place_share;
    for (std::size_t i = begin; i < groups_.size(); ++i) {
      if (!session_.stop_reason().empty()) return cut_rest(i);
      groups_[i]->set_standing(standing(*groups_[i]));
      groups_[i]->set_share(share(i));
      searched_[i].finalists = strategy_.run(*groups_[i]);
      groups_[i]->record_finalists(searched_[i].finalists);
    }
  }

  const std::vector<Searched>& searched() const { return searched_; }

 private:
  /// The warm starts, then those that the cost model predicts to be fastest: of all, and one of
  /// each family, whose default alone says little of it.
  std::vector<std::size_t> first_of(const VariantGroup& group) const {
    std::vector<std::size_t> order(group.variants().size());
    std::vector<double> estimates;
    for (std::size_t i = 0; i < order.size(); ++i) {
      order[i] = i;
      estimates.push_back(group.predicted_us(i));
    }
    const auto rest = order.begin() + static_cast<std::ptrdiff_t>(group.warm_starts());
    std::stable_sort(rest, order.end(),
                     [&](std::size_t a, std::size_t b) { return estimates[a] < estimates[b]; });
    std::map<std::string, int> taken;
    std::size_t at = 0;
    std::erase_if(order, [&](std::size_t index) {
      int& of_family = taken[group.variants()[index].family];
      if (at++ >= group.warm_starts() + promising_ && of_family >= enough_of_family) return true;
      ++of_family;
      return false;
    });
    return order;
  }

  /// The least time in which the fastest variants so far cover these stages, without those of one
  /// group.
  Cover cover(const Span& span, const VariantGroup* without = nullptr) const {
    std::vector<Piece> pieces;
    for (const auto& group : groups_)
      if (group.get() != without) pieces.push_back({group->span(), group->best_us()});
    return least_cover(pieces, span);
  }

  /// A group's part of what the whole may be slower than the best: a stage of a hundredth of the
  /// time is not worth a long search.
  VariantGroup::Standing standing(const VariantGroup& group) const {
    const Cover whole = cover({0, stage_count_});
    const auto parts = static_cast<double>(std::max<std::size_t>(whole.pieces.size(), 1));
    return {session_.options().least_gain * whole.cost / parts, cover(group.span(), &group).cost};
  }

  void compile_first(const std::vector<std::pair<VariantGroup*, std::vector<std::size_t>>>& first) {
    if (session_.cancelled() || first.empty()) return;
    VariantGroup& group = *first.front().first;
    group.enter(Phase::compile, group.variants().size());
    VariantGroup::compile_together(first);
  }

  void try_first(VariantGroup& group, const std::vector<std::size_t>& first) {
    if (session_.cancelled()) return;
    group.enter(Phase::compile, group.variants().size());
    group.compile(first);
    group.enter(Phase::screen, group.variants().size());
    for (const auto index : first) {
      // One that is compiled takes milliseconds, however long its compiling took.
      const bool ended = session_.cancelled() || !session_.evaluator().lost().empty();
      if (group.stopped() && have_one(group) && (ended || !group.is_compiled(index))) return;
      if (index >= group.warm_starts() && group.enough()) return;
      group.screen(index, group.best_us() * 1.5);
    }
  }

  bool have_one(const VariantGroup& group) const { return !group.timed().empty(); }

  void cut_rest(std::size_t begin) {
    for (std::size_t i = begin; i < groups_.size(); ++i) groups_[i]->cut_short();
  }

  double share(std::size_t place) const {
    double rest = 0;
    for (std::size_t i = place; i < groups_.size(); ++i) rest += weight(i);
    const double left = is_tuned_in_place(session_)
                            ? session_.seconds_left() - for_in_place_
                            : session_.seconds_left() * (1 - conclusion_share);
    return left * weight(place) / rest;
  }

  /// The number of variants to try, and their part of the time of the whole.
  double weight(std::size_t place) const {
    const VariantGroup& group = *groups_[place];
    const double part = group.best_us() / cover({0, stage_count_}).cost;
    return (static_cast<double>(std::min(group.variants().size(), most_weighed)) +
            group_overhead_variants) *
           (std::isfinite(part) ? std::clamp(part, least_part, 1.0) : 1.0);
  }

  Session& session_;
  const Strategy& strategy_;
  const std::size_t stage_count_;
  const std::size_t promising_;  // of each group
  std::vector<std::unique_ptr<VariantGroup>> groups_;
  std::vector<Searched> searched_;
  std::size_t variants_ = 0;
  double for_in_place_ = 0;  // seconds that no group takes, where there is a search in place
};

/// The groups with variants that have not been tried yet: a fallback that serves alone is searched
/// in the first place.
std::vector<GroupSpec> not_tried(std::vector<GroupSpec> groups, const Tuning& tuning) {
  std::set<std::string> tried;
  for (const auto& searched : tuning.searched())
    for (const Variant& variant : searched.group->variants()) tried.insert(variant.id());
  std::erase_if(groups, [&](const GroupSpec& group) {
    return std::all_of(group.variants.begin(), group.variants.end(),
                       [&](const Variant& variant) { return tried.contains(variant.id()); });
  });
  return groups;
}

std::vector<Outcome> outcomes_of(const Tuning& tuning) {
  std::vector<Outcome> outcomes;
  for (const auto& searched : tuning.searched())
    for (std::size_t i = 0; i < searched.group->variants().size(); ++i)
      outcomes.push_back(searched.group->outcome(i));
  return outcomes;
}

/// Why the search is not complete; empty if it is.
std::string stopped_by(const Session& session, const Tuning& tuning) {
  const auto reason = session.stop_reason();
  if (session.cancelled() || !session.evaluator().lost().empty()) return reason;
  for (const auto& searched : tuning.searched()) {
    if (!searched.group->was_cut_short()) continue;
    if (searched.group->enough())
      return fmt::format("{} variants of {} were tried, as asked", session.options().max_variants,
                         searched.group->name());
    return reason.empty() ? fmt::format("the time for {} was spent", searched.group->name())
                          : reason;
  }
  return "";
}

struct LeftOut {
  int quarantined = 0;
  int killed = 0;
};

/// By the stages, which a group of fallbacks may share with another.
std::map<std::string, LeftOut> left_out(const Tuning& tuning) {
  std::map<std::string, LeftOut> all;
  for (const auto& searched : tuning.searched()) {
    auto& own = all[searched.group->name()];
    own.quarantined += searched.group->count(OutcomeKind::quarantined);
    own.killed += searched.group->count(OutcomeKind::killed);
  }
  return all;
}

std::string variants_text(int count, const std::string& name) {
  return count == 1 ? fmt::format("1 variant of {} was", name)
                    : fmt::format("{} variants of {} were", count, name);
}

/// Says which variants were left out although they may be the best, and how to have them tried;
/// returns whether there are any.
bool told_left_out(const Tuning& tuning, TuneResult& result) {
  bool any = false;
  for (const auto& [name, out] : left_out(tuning)) {
    any = any || out.quarantined > 0 || out.killed > 0;
    if (out.quarantined > 0)
      result.notes.push_back(
          fmt::format("{} left out: a worker process went down with it in an earlier search of "
                      "this problem; --retry-quarantined tries again",
                      variants_text(out.quarantined, name)));
    if (out.killed > 0)
      result.notes.push_back(
          fmt::format("{} not measured: the process was killed each time, as happens when memory "
                      "runs out; free some, or raise its limit, and search again",
                      variants_text(out.killed, name)));
  }
  return any;
}

/// A search whose processes were killed has no result for want of memory, not of time.
std::string with_the_killed(const Tuning& tuning, const std::string& stopped) {
  int killed = 0;
  for (const auto& [name, out] : left_out(tuning)) killed += out.killed;
  if (killed == 0 || stopped.empty()) return stopped;
  return fmt::format(
      "the processes of {} variant{} were killed, as happens when memory runs out; then {}", killed,
      killed == 1 ? "" : "s", stopped);
}

}  // namespace

double default_budget_seconds(DeviceKind kind, double floor_seconds) {
  // A few hundred variants, each run a dozen times at a few times the floor, and what compiling,
  // verifying and starting them costs.
  return kind == DeviceKind::cpu ? 13 + 50 * floor_seconds : 24 + 3000 * floor_seconds;
}

namespace {

/// Says which variants have no memory, or no library, and whether that is for the moment alone.
void tell_lacking(const Session& session, TuneResult& result) {
  const Setup& setup = session.setup();
  const DeviceFacts& facts = session.evaluator().facts();
  if (!setup.left_out.empty()) result.notes.push_back(setup.left_out);
  if (setup.for_now) result.lacked = setup.left_out;
  const std::string lacking = lacking_for_now(facts);
  if (lacking.empty()) return;
  const auto families = session.op().families();
  const bool depends = std::any_of(families.begin(), families.end(), [&](const Family* family) {
    if (family->device_kind() != facts.kind) return false;
    const auto refusal = family->refusal(session.problem(), facts);
    return refusal && refusal->find(lacking) != refusal->npos;
  });
  if (!depends) return;
  result.lacked = lacking;
  result.notes.push_back("families are left out: " + lacking);
}

}  // namespace

TuneResult tune(const Catalog& catalog, Evaluator& evaluator, const Problem& problem,
                const TuneOptions& options) {
  return tune_in_place(catalog, evaluator, problem, options, {}, options.budget_seconds);
}

TuneResult tune_in_place(const Catalog& catalog, Evaluator& evaluator, const Problem& repeated,
                         const TuneOptions& options, SweepPosition position,
                         double budget_seconds) {
  const Strategy& strategy = strategy_named(options.strategy);
  const Op& op = catalog.op(repeated.op);
  const Problem problem = unrepeated(op, repeated);  // what records are of
  const std::size_t stage_count = op.stages(problem).size();
  TuneResult result;
  result.problem = problem;

  Session session(catalog, op, evaluator, problem, options, position);
  auto groups = groups_of(session, result);
  session.prepare();
  result.prepared_seconds = session.seconds();
  tell_lacking(session, result);
  const bool given = options.budget_seconds > 0;
  if (budget_seconds <= 0)
    budget_seconds =
        default_budget_seconds(evaluator.facts().kind, session.floor_us(0, stage_count) / 1e6);
  // A user's budget is for all there is to do, the default one for the search.
  session.set_budget(budget_seconds + (given ? 0 : result.prepared_seconds));

  if (const auto present = options.same_bits_as.find(problem);
      present != options.same_bits_as.end())
    require_bits_of(present->second, session);

  Tuning tuning(session, strategy);
  tuning.search(std::move(groups));
  if (!have_cover(tuning.searched(), stage_count) && session.stop_reason().empty() &&
      !options.only.contains(problem)) {
    std::vector<Span> working;
    for (const auto& searched : tuning.searched())
      if (!searched.group->timed().empty()) working.push_back(searched.group->span());
    auto slow = enumerate(op, problem, evaluator.facts(), warm_starts(session), true);
    auto needed = not_tried(fallbacks_needed(working, std::move(slow.groups), stage_count), tuning);
    if (!needed.empty()) {
      const auto failure = first_failure(outcomes_of(tuning));
      result.notes.push_back(
          fmt::format("no variant of a stage works{}: its fallback family is tried, which is slow",
                      failure ? fmt::format(" ({})", failure_text(*failure)) : ""));
      tuning.search(std::move(needed));
    }
  }
  result.outcomes = outcomes_of(tuning);
  for (const auto& searched : tuning.searched())
    if (auto outlook = searched.group->outlook(); !outlook.empty())
      result.notes.push_back(std::move(outlook));
  conclude(session, tuning.searched(), result);
  for (auto& remark : evaluator.remarks()) result.notes.push_back(std::move(remark));

  session.launch({});  // nothing is in flight any more
  result.stopped = stopped_by(session, tuning);
  result.cancelled = session.cancelled();
  result.device_lost = !evaluator.lost().empty();
  const bool complete = !told_left_out(tuning, result) && result.stopped.empty();
  if (result.record)
    result.record->verdict.complete = complete;
  else if (!result.cancelled && !result.device_lost)
    result.stopped = with_the_killed(tuning, result.stopped);
  result.seconds = session.seconds();
  session.progress().phase = Phase::done;
  session.tell();
  return result;
}

}  // namespace fftune
