#include "tuning/search/group.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "measure/statistics.hpp"
#include "tuning/journal/journal.hpp"
#include "tuning/journal/quarantine.hpp"
#include "tuning/search/enumerate.hpp"

namespace fftune {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// Samples are asked for in portions of about this long, so that an interruption is soon heard.
constexpr double portion_seconds = 0.5;
/// Shortest duration of a sample, even for a very short variant.
constexpr double shortest_sample_us = 300;

/// A variant is screened by at most this many samples, and by one if that takes this long.
constexpr int screening_samples = 3;
constexpr double screening_seconds = 0.004;

/// Spill stores and loads that a kernel may have, bytes a thread: a few words that are kept in
/// memory around the main loop cost nothing, and one of the fastest fp8 tiles has 40 bytes of them.
/// A warm start may have any: it is what would run otherwise.
constexpr int most_spill_bytes = 64;

/// The outcome of a candidate whose process died; nothing if it did not.
template <typename Result>
std::optional<OutcomeKind> died(const Result& result) {
  if (!result.fatal) return {};
  return result.killed ? OutcomeKind::killed : OutcomeKind::crashed;
}

}  // namespace

VariantGroup::VariantGroup(Session& session, GroupSpec spec)
    : session_(session),
      spec_(std::move(spec)),
      required_bits_(session.required_bits(spec_.span)),
      floor_us_(session.floor_us(spec_.span.first_stage, spec_.span.stage_count)),
      deadline_(infinity),
      entries_(spec_.variants.size()),
      best_us_(infinity),
      enough_(any_of({})) {
  if (session.options().max_variants > 0)
    enough_ = stop_after_variants(session.options().max_variants);
  const auto stages = session.op().stages(session.problem());
  for (std::size_t i = 0; i < spec_.span.stage_count; ++i)
    name_ += (i ? "+" : "") + stages[spec_.span.first_stage + i].name;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    auto& entry = entries_[i];
    const auto& family = family_of(session.op(), spec_.variants[i].family);
    entry.source_hash = session.catalog().sources->hash(family.sources());
    entry.outcome.first_stage = spec_.span.first_stage;
    entry.outcome.id = spec_.variants[i].id();
    recall(i);
    update_best(i);
  }
}

/// Takes its earlier outcomes from the journal and the quarantine.
void VariantGroup::recall(std::size_t index) {
  auto& entry = entries_[index];
  const auto& options = session_.options();
  if (options.journal) {
    const auto known = options.journal->known(session_.problem(), entry.source_hash,
                                              spec_.span.first_stage, entry.outcome.id);
    // A quarantined variant may have been released since, and there may be more memory.
    const bool crashed = known && known->kind == OutcomeKind::crashed;
    // Whether its bits are the right ones is asked anew.
    const bool other = known && known->bits != required_bits_ && !required_bits_.empty();
    if (known && known->kind != OutcomeKind::quarantined && known->kind != OutcomeKind::killed &&
        known->kind != OutcomeKind::other_bits && !other &&
        !(crashed && options.retry_quarantined)) {
      entry.outcome = *known;
      entry.outcome.finalist = false;
      entry.from_journal = true;
      if (known->kind == OutcomeKind::measured) entry.samples = {known->median_us};
      return;
    }
  }
  if (!options.quarantine || options.retry_quarantined) return;
  const auto found =
      options.quarantine->find(session_.problem(), entry.outcome.id, entry.source_hash);
  if (!found) return;
  entry.outcome.kind = OutcomeKind::quarantined;
  entry.outcome.reason = "quarantined on " + found->date + ": " + found->cause;
  session_.record(entry.source_hash, entry.outcome);
}

Candidate VariantGroup::candidate(std::size_t index) const {
  return {spec_.span.first_stage, {spec_.variants[index]}, ""};
}

std::vector<std::size_t> VariantGroup::timed() const {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < entries_.size(); ++i)
    if (entries_[i].outcome.kind == OutcomeKind::measured) indices.push_back(i);
  return indices;
}

void VariantGroup::record_finalists(const std::vector<std::size_t>& indices) {
  for (const auto index : indices) {
    auto& entry = entries_[index];
    if (entry.outcome.kind != OutcomeKind::measured) continue;
    entry.outcome.finalist = true;
    session_.record(entry.source_hash, entry.outcome);
  }
}

void VariantGroup::compile(const std::vector<std::size_t>& indices) {
  compile_together({{this, indices}});
}

void VariantGroup::compile_together(
    const std::vector<std::pair<VariantGroup*, std::vector<std::size_t>>>& wanted) {
  std::vector<std::pair<VariantGroup*, std::size_t>> all;
  Candidates candidates;
  for (const auto& [group, indices] : wanted)
    for (const auto index : indices) {
      const auto& entry = group->entries_[index];
      if (entry.compiled || entry.from_journal || entry.outcome.failed()) {
        group->count_compile(index);
        continue;
      }
      all.emplace_back(group, index);
      candidates.push_back(group->candidate(index));
    }
  if (all.empty()) return;
  all.front().first->session_.evaluator().compile(candidates,
                                                  [&](std::size_t i, const Compiled& compiled) {
                                                    const auto& [group, index] = all[i];
                                                    group->take_compiled(index, compiled);
                                                    group->count_compile(index);
                                                    return !group->stopped();
                                                  });
}

void VariantGroup::take_compiled(std::size_t index, const Compiled& compiled) {
  auto& entry = entries_[index];
  entry.compiled = true;
  entry.outcome.registers = compiled.registers;
  entry.outcome.spill_bytes = compiled.spill_bytes;
  entry.outcome.compile_seconds = compiled.seconds;
  entry.outcome.cached = compiled.cached;
  session_.count_compiled();
  if (!compiled.failure.empty())
    fail(index, died(compiled).value_or(OutcomeKind::compile_failed), compiled.failure,
         compiled.fatal);
  else if (compiled.spill_bytes > most_spill_bytes && index >= spec_.warm_starts &&
           !session_.options().only.contains(session_.problem()))
    fail(index, OutcomeKind::spilled,
         "spills " + std::to_string(compiled.spill_bytes) + " bytes a thread from registers");
}

void VariantGroup::fail(std::size_t index, OutcomeKind kind, const std::string& reason,
                        bool fatal) {
  auto& entry = entries_[index];
  entry.outcome.kind = kind;
  entry.outcome.reason = reason;
  entry.samples.clear();
  update_best(index);
  session_.record(entry.source_hash, entry.outcome);
  if (fatal && kind != OutcomeKind::killed)
    session_.quarantine(entry.source_hash, entry.outcome, true);
}

bool VariantGroup::ready(std::size_t index) {
  auto& entry = entries_[index];
  if (entry.outcome.failed()) return false;
  if (!entry.compiled) {
    session_.evaluator().compile({candidate(index)}, [&](std::size_t, const Compiled& compiled) {
      take_compiled(index, compiled);
      return true;
    });
    if (entry.outcome.failed()) return false;
  }
  if (entry.verified) return true;
  session_.launch({candidate(index)});
  return take_verified(index, session_.evaluator().verify(candidate(index)));
}

bool VariantGroup::take_verified(std::size_t index, const Verified& verified) {
  if (verified.cancelled) return false;  // not tried
  auto& entry = entries_[index];
  entry.verified = true;
  entry.outcome.error = verified.error;
  entry.outcome.bits = verified.bits;
  if (verified.passed && (required_bits_.empty() || verified.bits == required_bits_)) return true;
  if (verified.passed) {
    fail(index, OutcomeKind::other_bits,
         "its results differ in some bits from the present winner's");
    return false;
  }
  fail(index,
       verified.device_fault ? OutcomeKind::device_fault
                             : died(verified).value_or(OutcomeKind::verify_failed),
       verified.failure, verified.fatal);
  return false;
}

void VariantGroup::take_timing(std::size_t index, const Timing& timing) {
  auto& entry = entries_[index];
  if (!timing.failure.empty())
    return fail(index,
                timing.device_fault ? OutcomeKind::device_fault
                                    : died(timing).value_or(OutcomeKind::launch_failed),
                timing.failure, timing.fatal);
  if (timing.samples_us.empty()) return;
  if (std::exchange(entry.stale, false)) entry.samples.clear();
  if (entry.samples.empty()) entry.turn = turn_;
  entry.samples.insert(entry.samples.end(), timing.samples_us.begin(), timing.samples_us.end());
  const auto summary = summarise(entry.samples);
  entry.outcome.kind = OutcomeKind::measured;
  entry.outcome.samples = summary.samples;
  entry.outcome.median_us = summary.median;
  entry.outcome.low_us = summary.low;
  entry.outcome.high_us = summary.high;
  update_best(index);
}

double VariantGroup::predicted_us(std::size_t index) const {
  const auto& variant = spec_.variants[index];
  return cost_model_us(family_of(session_.op(), variant.family), problem(), facts(), variant.config,
                       floor_us_);
}

std::vector<double> VariantGroup::traits(std::size_t index) const {
  const auto& variant = spec_.variants[index];
  return launch_traits(family_of(session_.op(), variant.family), problem(), facts(),
                       variant.config);
}

void VariantGroup::screen(std::size_t index, double abandon_us) {
  auto& entry = entries_[index];
  // Tried before, here or in the journal: the known outcome stands.
  const bool done = entry.outcome.kind != OutcomeKind::not_tried;
  if (!done && ready(index)) {
    TimeRequest request;
    request.samples = screening_samples;
    request.seconds = screening_seconds;
    request.abandon_above_us = abandon_us;
    take_screened(index, session_.evaluator().time({candidate(index)}, request).front());
  }
  count_screen(index);
}

void VariantGroup::take_screened(std::size_t index, const Timing& timing) {
  const auto& entry = entries_[index];
  ++turn_;
  take_timing(index, timing);
  ++tried_;
  if (entry.outcome.failed()) return;
  session_.record(entry.source_hash, entry.outcome);
  session_.quarantine(entry.source_hash, entry.outcome, false);
}

std::vector<std::size_t> VariantGroup::screen_all(const std::vector<std::size_t>& indices,
                                                  double band, int samples) {
  std::vector<std::size_t> reached, wanted;
  Candidates candidates;
  for (const auto index : indices) {
    if (entries_[index].outcome.kind != OutcomeKind::not_tried) {
      count_screen(index);
      reached.push_back(index);
      continue;
    }
    wanted.push_back(index);
    candidates.push_back(candidate(index));
  }
  std::set<std::size_t> running;  // of `candidates`
  TrialCalls calls;
  calls.begins = [&](std::size_t i) {
    running.insert(i);
    Candidates in_flight;
    for (const auto each : running) in_flight.push_back(candidates[each]);
    session_.launch(in_flight);
  };
  calls.request = [&] {
    TimeRequest request;
    request.samples = samples;
    if (samples <= screening_samples) request.seconds = screening_seconds;
    request.abandon_above_us = best_us_ * band;
    return request;
  };
  calls.ends = [&](std::size_t i, const Verified& verified, const Timing& timing) {
    running.erase(i);
    if (take_verified(wanted[i], verified)) take_screened(wanted[i], timing);
    count_screen(wanted[i]);
    reached.push_back(wanted[i]);
    return !stopped() && !enough();
  };
  session_.evaluator().try_each(candidates, calls);
  return reached;
}

void VariantGroup::measure(const std::vector<std::size_t>& indices, int samples, double seconds) {
  const double began = session_.seconds();
  ++turn_;
  std::vector<std::size_t> live;
  for (const auto index : indices) {
    if (stopped()) return;
    if (ready(index)) live.push_back(index);
  }
  for (int taken = 0; taken < samples && !stopped();) {
    Candidates candidates;
    double round_us = 0;
    for (const auto index : live) {
      candidates.push_back(candidate(index));
      const double median = median_us(index);
      round_us += std::max(std::isfinite(median) ? median : 0, shortest_sample_us);
    }
    if (candidates.empty()) break;
    if (taken == 0) session_.launch(candidates);
    const double left = seconds - (session_.seconds() - began);
    if (taken > 0 && left <= 0) break;
    TimeRequest request;
    request.samples =
        std::clamp(static_cast<int>(portion_seconds * 1e6 / round_us), 1, samples - taken);
    request.seconds = std::max(left, 0.0);
    const auto timings = session_.evaluator().time(candidates, request);
    for (std::size_t i = 0; i < live.size(); ++i) take_timing(live[i], timings[i]);
    std::erase_if(live, [&](std::size_t index) { return entries_[index].outcome.failed(); });
    taken += request.samples;
    session_.progress().done = taken;
    session_.progress().total = samples;
    session_.tell();
  }
  // A sweep that resumes, and whoever reads the journal, gets the better figure.
  for (const auto index : live)
    if (!entries_[index].stale)
      session_.record(entries_[index].source_hash, entries_[index].outcome);
}

void VariantGroup::forget(const std::vector<std::size_t>& indices) {
  for (const auto index : indices) entries_[index].stale = true;
}

void VariantGroup::expect_gain(double gain) {
  gain_ = gain;
  spent_ = session_.seconds() - began_;
  session_.progress().gain_left = gain;
  session_.tell();
}

double VariantGroup::least_gain() const {
  const double least = session_.options().least_gain;
  if (!standing_ || !std::isfinite(best_us_)) return least;
  // Slower than the others, it has to catch up first.
  const double behind = std::max(best_us_ - standing_->others_us, 0.0);
  return std::max(least, (standing_->least_us + behind) / best_us_);
}

bool VariantGroup::hardly_begun() const {
  return cut_short_ && !enough() && screen_counted_ < least_tried &&
         static_cast<std::size_t>(screen_counted_) < entries_.size();
}

std::vector<std::string> VariantGroup::untried_families() const {
  if (!cut_short_ || enough()) return {};
  // A default is not so bad that another variant of its family makes up for more.
  constexpr double hopeless = 1.5;
  struct Count {
    int tried = 0, all = 0;
    double best_us = infinity;
  };
  std::map<std::string, Count> counts;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    Count& count = counts[spec_.variants[i].family];
    count.tried += entries_[i].outcome.kind != OutcomeKind::not_tried;
    ++count.all;
    count.best_us = std::min(count.best_us, median_us(i));
  }
  std::vector<std::string> untried;
  for (const auto& [family, count] : counts)
    if (count.tried < std::min(2, count.all) &&
        (count.tried == 0 || count.best_us <= best_us_ * hopeless) &&
        !family_of(session_.op(), family).is_fallback())
      untried.push_back(family);
  return untried;
}

std::string VariantGroup::extent() const {
  return fmt::format("{} of {} variants of {}", screen_counted_, entries_.size(), name_);
}

int VariantGroup::count(OutcomeKind kind) const {
  return static_cast<int>(std::count_if(entries_.begin(), entries_.end(),
                                        [&](const auto& e) { return e.outcome.kind == kind; }));
}

std::string VariantGroup::outlook() const {
  if (!gain_) return "";
  const auto left = static_cast<double>(entries_.size()) - screen_counted_;
  const double each = screen_counted_ > 0 ? spent_ / screen_counted_ : 0;
  const double more = left * each;  // seconds
  return fmt::format("{} were tried{}: the others may gain {:.1f}% at most, in about {}", extent(),
                     cut_short_ && !enough() ? ", then its time was spent" : "", 100 * *gain_,
                     more < 90 ? fmt::format("{:.0f} more seconds", std::max(more, 1.0))
                               : fmt::format("{:.1f} more minutes", more / 60));
}

double VariantGroup::median_us(std::size_t index) const {
  const auto& outcome = entries_[index].outcome;
  return outcome.kind == OutcomeKind::measured ? outcome.median_us : infinity;
}

bool VariantGroup::undecided(const std::vector<std::size_t>& indices) const {
  std::vector<std::size_t> timed;
  for (const auto index : indices)
    if (std::isfinite(median_us(index))) timed.push_back(index);
  const double band = session_.options().tie_band;
  return tied(finalists_of(*this, timed), band).is_open(band);
}

void VariantGroup::update_best(std::size_t index) {
  if (median_us(index) < best_us_)
    best_ = index;
  else if (index == best_)
    for (std::size_t i = 0; i < entries_.size(); ++i)
      if (median_us(i) < median_us(best_)) best_ = i;
  best_us_ = entries_.empty() ? infinity : median_us(best_);
  show_best();
}

void VariantGroup::show_best() {
  auto& progress = session_.progress();
  const bool any = std::isfinite(best_us_);
  progress.best_us = any ? best_us_ : 0;
  progress.best_id = any ? entries_[best_].outcome.id : "";
  progress.roofline = any ? floor_us_ / best_us_ : 0;
}

bool VariantGroup::stopped() const {
  return seconds_left() <= 0 || !session_.stop_reason().empty();
}

double VariantGroup::seconds_left() const {
  return std::min(deadline_ - session_.seconds(), session_.seconds_left());
}

void VariantGroup::enter(Phase phase, std::size_t total) {
  auto& progress = session_.progress();
  progress.phase = phase;
  progress.group = name_;
  progress.done = phase == Phase::compile  ? compile_counted_
                  : phase == Phase::screen ? screen_counted_
                                           : 0;
  progress.total = static_cast<int>(total);
  progress.gain_left = gain_.value_or(-1);
  show_best();
  session_.tell();
  if (phase == Phase::finals) session_.settle();
}

void VariantGroup::count_compile(std::size_t index) {
  if (std::exchange(entries_[index].compile_counted, true)) return;
  ++compile_counted_;
  if (session_.progress().phase == Phase::compile) session_.progress().done = compile_counted_;
  session_.tell();
}

void VariantGroup::count_screen(std::size_t index) {
  if (std::exchange(entries_[index].screen_counted, true)) return;
  ++screen_counted_;
  if (session_.progress().phase == Phase::screen) session_.progress().done = screen_counted_;
  session_.count_reached();
  session_.tell();
}

std::vector<Finalist> finalists_of(const VariantGroup& group,
                                   const std::vector<std::size_t>& indices) {
  const auto fastest = std::min_element(
      indices.begin(), indices.end(),
      [&](std::size_t a, std::size_t b) { return group.median_us(a) < group.median_us(b); });
  std::vector<Finalist> all;
  for (const auto index : indices) {
    const auto& outcome = group.outcome(index);
    all.push_back(
        {outcome.id, outcome.median_us, outcome.registers, outcome.low_us, outcome.high_us,
         group.in_turns(index, *fastest) ? group.samples_us(index) : std::span<const double>{}});
  }
  return all;
}

}  // namespace fftune
