#include "tuning/search/session.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "measure/roofline.hpp"
#include "tuning/journal/journal.hpp"
#include "tuning/journal/quarantine.hpp"
#include "tuning/log.hpp"

namespace fftune {
namespace {

constexpr double look_again_seconds = 0.25;

}  // namespace

std::function<double()> clock_of(const TuneOptions& options) {
  if (options.now) return options.now;
  return [] {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
  };
}

Session::Session(const Catalog& catalog, const Op& op, Evaluator& evaluator, const Problem& problem,
                 const TuneOptions& options, SweepPosition position)
    : catalog_(catalog),
      op_(op),
      evaluator_(evaluator),
      problem_(problem),
      options_(options),
      now_(clock_of(options)),
      started_(now_()),
      budget_seconds_(std::numeric_limits<double>::infinity()),
      stop_(any_of({})),
      patience_seconds_(options.patience_seconds) {
  progress_.problem = problem;
  progress_.problem_index = position.index;
  progress_.problem_count = position.count;
}

void Session::prepare() {
  tell();
  limits_ = evaluator_.limits(problem_.dtype);
  tell();
  if (options_.quarantine && !options_.retry_quarantined) {
    std::set<std::string> ids;
    for (const auto& entry : options_.quarantine->of(problem_)) ids.insert(entry.id);
    evaluator_.avoid(std::move(ids));
  }
  setup_ = evaluator_.begin(problem_);
  if (!setup_.refusal.empty()) throw Error(ErrorKind::unavailable, setup_.refusal);
  is_disturbed_ = !evaluator_.disturbances().empty();
  prepared_ = seconds();
}

void Session::set_budget(double budget_seconds) {
  budget_seconds_ = budget_seconds;
  std::vector<StopRule> rules;
  if (options_.cancel) rules.push_back(stop_when(*options_.cancel, "interrupted"));
  rules.push_back(stop_after_seconds(budget_seconds, options_.budget_seconds));
  stop_ = any_of(std::move(rules));
}

double Session::floor_us(std::size_t first_stage, std::size_t stage_count) const {
  const auto stages = op_.stages(problem_);
  // Tensors between all of them need not leave the caches.
  const Cost cost = stage_count == stages.size() ? cost_of(op_, problem_)
                                                 : cost_of_stages(stages, first_stage, stage_count);
  return floor_seconds(cost, limits_) * 1e6;
}

const char* Session::limit() const {
  return limit_of(cost_of(op_, problem_), limits_);
}

double Session::seconds() const {
  return now_() - started_;
}

bool Session::cancelled() const {
  return options_.cancel && *options_.cancel;
}

std::string Session::stop_reason() const {
  if (const auto lost = evaluator_.lost(); !lost.empty()) return "the device is lost: " + lost;
  return stop_({seconds(), 0});
}

void Session::record(const std::string& source_hash, const Outcome& outcome) {
  // A correct variant whose bits differ from the requested ones has not failed.
  if (outcome.failed() && outcome.kind != OutcomeKind::other_bits) ++progress_.failed;
  if (options_.journal) options_.journal->add(problem_, source_hash, outcome);
}

void Session::launch(const Candidates& candidates) {
  if (!options_.journal) return;
  std::vector<std::string> ids;
  for (const auto& candidate : candidates) ids.push_back(candidate.id());
  options_.journal->launch(problem_, ids);
}

void Session::quarantine(const std::string& source_hash, const Outcome& outcome, bool fatal) {
  if (!options_.quarantine) return;
  if (fatal)
    options_.quarantine->add(problem_, outcome.id, source_hash, outcome.reason);
  else
    options_.quarantine->release(problem_, outcome.id, source_hash);
}

std::vector<std::string> Session::settle() {
  auto found = evaluator_.disturbances();
  is_disturbed_ = !found.empty();
  const double longest = wait_left();
  if (found.empty() || longest <= 0 || !stop_reason().empty()) return found;
  logging::warn("{}: {}: waiting for {:.3g} s at most", problem_.text(), fmt::join(found, ", "),
                longest);
  const double began = seconds();
  const auto waited = [&] { return seconds() - began; };
  while (!found.empty() && waited() < longest && stop_reason().empty()) {
    progress_.waits = longest - waited();
    tell();
    if (options_.sleep)
      options_.sleep(look_again_seconds);
    else
      std::this_thread::sleep_for(std::chrono::duration<double>(look_again_seconds));
    found = evaluator_.disturbances();
  }
  patience_seconds_ -= waited();
  is_disturbed_ = !found.empty();
  progress_.waits = 0;
  return found;
}

double Session::wait_left() const {
  // A user's budget is for the search too.
  const double most = options_.budget_seconds > 0 ? seconds_left() / 2 : seconds_left();
  return std::max(std::min(patience_seconds_, most), 0.0);
}

void Session::tell() {
  progress_.seconds = seconds();
  progress_.seconds_left = 0;
  if (reached_ > 0 && reached_ <= expected_) {
    const double each = (progress_.seconds - prepared_) / static_cast<double>(reached_);
    double rest = each * static_cast<double>(expected_ - reached_);
    if (progress_.waits > 0)
      rest += progress_.waits;
    else if (is_disturbed_)
      rest += wait_left();
    progress_.seconds_left = std::max(std::min(rest, seconds_left()), 0.0);
  }
  if (options_.progress) options_.progress->update(progress_);
}

std::vector<Recipe> recipes_on_record(const Session& session) {
  const TuneOptions& options = session.options();
  std::vector<Recipe> all;
  if (const auto own = options.on_record.find(session.problem()); own != options.on_record.end())
    all = own->second;
  if (const auto own = options.same_bits_as.find(session.problem());
      own != options.same_bits_as.end())
    all.push_back(own->second);
  return all;
}

}  // namespace fftune
