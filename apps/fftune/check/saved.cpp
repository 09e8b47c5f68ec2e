#include "apps/fftune/check/check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>

#include "apps/fftune/terminal/progress.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "apps/fftune/terminal/text_table.hpp"
#include "core/error.hpp"
#include "runtime/choice.hpp"
#include "tuning/evaluate/local_evaluator.hpp"

namespace fftune::tool {

namespace {

using Clock = std::chrono::steady_clock;

const TimeRequest brief{.samples = 20, .seconds = 1};

/// One problem with one seed; adds to the results of other seeds, unless it is cancelled.
void check_one(const Problem& problem, const Choice& choice, Evaluator& evaluator,
               std::uint64_t seed, const std::atomic<bool>& cancel, SavedCheck& check) {
  CheckOutcome& outcome = check.outcome;
  const Setup setup = evaluator.begin(problem);
  if (cancel) return;
  if (!setup.refusal.empty()) {
    outcome.state = CheckState::skipped;
    outcome.reason = setup.refusal;
    return;
  }
  const Candidate candidate{0, choice.recipe, ""};
  const Verified verified = evaluator.verify(candidate);
  if (verified.cancelled) return;
  outcome.state = verified.passed ? CheckState::passed : CheckState::failed;
  if (!verified.passed) outcome.reason = fmt::format("seed {}: {}", seed, verified.failure);
  if (verified.error >= outcome.error) {
    outcome.error = verified.error;
    outcome.tolerance = verified.tolerance;
  }
  if (!verified.passed || check.microseconds.samples > 0) return;
  const Timing timing = evaluator.time({candidate}, brief).front();
  if (timing.failure.empty()) {
    check.microseconds = summarise(timing.samples_us);
  } else {
    outcome.state = CheckState::failed;
    outcome.reason = timing.failure;
  }
}

bool is_done(const CheckOutcome& outcome) {
  return outcome.state == CheckState::failed || outcome.state == CheckState::skipped;
}

std::string time_text(const SavedCheck& check) {
  return check.microseconds.samples > 0 ? microseconds_text(check.microseconds.median) : "-";
}

std::string error_text_of(const SavedCheck& check) {
  return check.outcome.tolerance > 0 ? error_text(check.outcome.error) : "-";
}

}  // namespace

std::vector<SavedChecks> check_saved(const std::vector<Problem>& problems,
                                     const std::vector<SavedInputs>& saved, const Catalog& catalog,
                                     Backend& backend, const PresetLibrary& presets,
                                     const CheckSettings& settings) {
  std::vector<SavedChecks> checks;
  const DeviceKind kind = backend.facts().kind;
  const std::size_t draws = 2 * static_cast<std::size_t>(settings.seeds);  // random and saved
  double weight = 0;
  for (const Problem& problem : problems) {
    checks.push_back({.problem = problem});
    weight += static_cast<double>(draws) * estimated_seconds(catalog.op(problem.op), problem, kind);
  }
  const auto begun = Clock::now();
  ProgressBar progress(*settings.status, "check", draws * problems.size(), weight);
  for (const SavedInputs& of_op : saved)
    for (const GivenTensors* const given :
         {static_cast<const GivenTensors*>(nullptr), static_cast<const GivenTensors*>(&of_op)})
      for (int seed = 0; seed < settings.seeds; ++seed) {
        LocalEvaluator evaluator(backend, catalog, {static_cast<std::uint64_t>(seed), given}, -1,
                                 CancelFlags{settings.cancel, settings.cancel});
        for (SavedChecks& each : checks) {
          if (each.problem.op != of_op.op().name()) continue;
          if (settings.cancel->load() || !evaluator.lost().empty()) return checks;
          const double spent = std::chrono::duration<double>(Clock::now() - begun).count();
          if (settings.budget_seconds > 0 && spent > settings.budget_seconds) return checks;
          each.values = of_op.text();
          SavedCheck& check = given ? each.saved : each.random;
          const std::string now =
              fmt::format("{}, values: {}", each.problem.text(), given ? "saved" : "random");
          const double share = estimated_seconds(of_op.op(), each.problem, kind);
          if (is_done(check.outcome)) {
            progress.step(share, now);
            continue;
          }
          progress.show(now);
          const auto start = Clock::now();
          const Choice choice = choose(catalog, of_op.op(), each.problem, backend.facts(), presets);
          check.outcome.recipe = recipe_text(choice.recipe);
          check.outcome.rule = choice.reason;
          try {
            check_one(each.problem, choice, evaluator, static_cast<std::uint64_t>(seed),
                      *settings.cancel, check);
          } catch (const Error& error) {
            // A saved tensor whose numbers cannot be used; the other ops' can.
            if (given == nullptr || error.kind() != ErrorKind::invalid_input) throw;
            check.outcome.state = CheckState::failed;
            check.outcome.reason = error.what();
          }
          check.outcome.seconds += std::chrono::duration<double>(Clock::now() - start).count();
          progress.step(share, now);
        }
      }
  settings.status->clear();
  return checks;
}

void print_saved(const std::vector<SavedChecks>& checks, const Output& output) {
  TextTable table({{"problem"},
                   {"values"},
                   {"error", Align::right},
                   {"tolerance", Align::right},
                   {"median µs", Align::right},
                   {""},
                   {"loaded here by, or why not"}});
  for (const SavedChecks& each : checks)
    for (const SavedCheck* const check : {&each.random, &each.saved}) {
      const bool first = check == &each.random;
      const CheckOutcome& outcome = check->outcome;
      table.row({first ? each.problem.text() : "",
                 first ? "random" : "saved",
                 error_text_of(*check),
                 outcome.tolerance > 0 ? error_text(outcome.tolerance) : "-",
                 time_text(*check),
                 {state_name(outcome.state), state_style(outcome.state)},
                 outcome.reason.empty() ? outcome.rule : outcome.reason});
    }
  output.table(table);
}

Json saved_json(const std::vector<SavedChecks>& checks) {
  Json json = {{"checks", Json::Array()}};
  for (const SavedChecks& each : checks)
    for (const SavedCheck* const check : {&each.random, &each.saved})
      json["checks"].push_back({{"problem", to_json(each.problem)},
                                {"values", check == &each.random ? "random" : each.values},
                                {"state", state_name(check->outcome.state)},
                                {"recipe", check->outcome.recipe},
                                {"rule", check->outcome.rule},
                                {"error", check->outcome.error},
                                {"tolerance", check->outcome.tolerance},
                                {"median_us", check->microseconds.median},
                                {"low_us", check->microseconds.low},
                                {"high_us", check->microseconds.high},
                                {"reason", check->outcome.reason},
                                {"seconds", check->outcome.seconds}});
  return json;
}

CheckOutcomes outcomes_of(const std::vector<SavedChecks>& checks) {
  CheckOutcomes outcomes;
  for (const SavedChecks& each : checks) {
    CheckOutcome& outcome = outcomes[each.problem];
    outcome = each.saved.outcome;
    // A failure on random values counts, whatever the saved values give.
    if (each.random.outcome.state == CheckState::failed) outcome = each.random.outcome;
  }
  return outcomes;
}

}  // namespace fftune::tool
