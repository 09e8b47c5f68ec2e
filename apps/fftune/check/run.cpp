#include "apps/fftune/check/check.hpp"

#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "apps/fftune/command_line/problem_options.hpp"
#include "apps/fftune/terminal/progress.hpp"
#include "core/error.hpp"
#include "runtime/choice.hpp"
#include "runtime/plan.hpp"
#include "verify/host_threads.hpp"
#include "verify/verifier.hpp"

namespace fftune::tool {

namespace {

using Clock = std::chrono::steady_clock;

/// Checks the numbers of tokens of one layer, in ascending order: its weights serve them all, and
/// the reference of each goes on from that of the one before.
class LayerCheck {
 public:
  LayerCheck(const Op& op, const Problem& layer, std::set<std::int64_t> tokens,
             const Catalog& catalog, Backend& backend, const PresetLibrary& presets,
             const std::atomic<bool>* cancel, CheckOutcomes& outcomes)
      : op_(op),
        layer_(layer),
        tokens_(std::move(tokens)),
        catalog_(catalog),
        backend_(backend),
        presets_(presets),
        cancel_(cancel),
        outcomes_(outcomes) {}

  /// Returns false if the device failed and can do no more.
  bool run(const CheckSettings& settings, const std::function<void(const Problem&)>& step) {
    compile_ahead();
    for (int seed = 0; seed < settings.seeds; ++seed) {
      std::optional<Verifier> verifier;
      for (const std::int64_t count : tokens_) {
        if (cancel_->load()) return true;
        const Problem problem = problem_of(count);
        CheckOutcome& outcome = outcomes_[problem];
        const auto start = Clock::now();
        const bool usable = outcome.state == CheckState::failed ||
                            outcome.state == CheckState::skipped ||
                            check(problem, static_cast<std::uint64_t>(seed), verifier, outcome);
        outcome.seconds += std::chrono::duration<double>(Clock::now() - start).count();
        step(problem);
        if (!usable) return false;
      }
    }
    return true;
  }

 private:
  /// Compiles the plans' kernels in parallel, so that they find it compiled. A program that
  /// fails here fails again when a plan is built, which reports it.
  void compile_ahead() {
    std::vector<Program> programs;
    for (const std::int64_t count : tokens_) {
      const Problem problem = problem_of(count);
      try {
        for (const Variant& variant :
             choose(catalog_, op_, problem, backend_.facts(), presets_).recipe)
          programs.push_back(family_of(op_, variant.family)
                                 .program(verified(problem), backend_.facts(), variant.config));
      } catch (const Error&) {
      }
    }
    compiled_.resize(programs.size());
    HostThreads threads;
    threads.run(static_cast<int>(programs.size()), threads.max_threads(), [&](int i) {
      try {
        compiled_[static_cast<std::size_t>(i)] =
            backend_.compile(programs[static_cast<std::size_t>(i)]);
      } catch (const Error&) {
      }
    });
  }

  Problem problem_of(std::int64_t tokens) const {
    return layer_.with_size(op_.token_size(), tokens);
  }

  /// A record for the ranks of a group is checked by one rank, which plays all: with the recipe
  /// that the ranks load.
  Problem verified(const Problem& problem) const {
    return on_one_rank(op_, problem, backend_.facts().kind);
  }

  /// One problem with one seed. A plan under test is a candidate: that it cannot be built or runs
  /// into a fault is the outcome of its check, and the others follow.
  bool check(const Problem& problem, std::uint64_t seed, std::optional<Verifier>& verifier,
             CheckOutcome& outcome) {
    try {
      const Plan& plan = plan_of(problem, outcome);
      if (!prepare(problem, seed, verifier, outcome)) return true;
      const Verification result =
          verifier->verify(0, op_.stages(problem).size(), plan.executables(), plan.used());
      outcome.state = result.passed ? CheckState::passed : CheckState::failed;
      outcome.reason =
          result.failure.empty() ? "" : fmt::format("seed {}: {}", seed, result.failure);
      if (result.error >= outcome.error) {
        outcome.error = result.error;
        outcome.tolerance = result.tolerance;
      }
      return true;
    } catch (const Cancelled&) {  // the draws before this one stand
      return true;
    } catch (const Error& error) {
      outcome.state = CheckState::failed;
      outcome.reason = error.what();
      return error.kind() != ErrorKind::device_fault;
    }
  }

  const Plan& plan_of(const Problem& problem, CheckOutcome& outcome) {
    const auto known = plans_.find(problem);
    if (known != plans_.end()) return *known->second;
    const Choice choice = choose(catalog_, op_, problem, backend_.facts(), presets_);
    outcome.recipe = recipe_text(choice.recipe);
    outcome.rule = choice.reason;
    if (needs_group(problem)) outcome.rule += "; checked by one rank that plays all";
    auto plan = std::make_unique<Plan>(backend_, op_, verified(problem), choice.recipe);
    return *plans_.emplace(problem, std::move(plan)).first->second;
  }

  /// Data and reference for the problem; false, and a skipped outcome, if they do not fit here.
  bool prepare(const Problem& problem, std::uint64_t seed, std::optional<Verifier>& verifier,
               CheckOutcome& outcome) {
    try {
      if (verifier)
        verifier->retoken(problem.size(op_.token_size()));
      else
        verifier.emplace(backend_, op_, verified(problem), seed, nullptr,
                         CancelFlags{cancel_, cancel_});
      return true;
    } catch (const Cancelled&) {
      throw;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unavailable) throw;
      verifier.reset();
      outcome.state = CheckState::skipped;
      outcome.reason = error.what();
      return false;
    }
  }

  const Op& op_;
  Problem layer_;
  std::set<std::int64_t> tokens_;
  const Catalog& catalog_;
  Backend& backend_;
  const PresetLibrary& presets_;
  const std::atomic<bool>* cancel_;
  CheckOutcomes& outcomes_;
  std::vector<CompileResult> compiled_;  // ahead: held until the layer is done
  std::map<Problem, std::unique_ptr<Plan>> plans_;
};

}  // namespace

CheckOutcomes run_checks(const std::vector<CheckedRecord>& records, const Catalog& catalog,
                         Backend& backend, const PresetLibrary& presets,
                         const CheckSettings& settings) {
  CheckOutcomes outcomes;
  std::map<Problem, std::size_t> places;
  std::vector<std::pair<Problem, std::set<std::int64_t>>> layers;
  const DeviceKind kind = backend.facts().kind;
  std::size_t steps = 0;
  double weight = 0;
  for (const CheckedRecord& record : records) {
    if (!record.skipped.empty()) continue;
    const Op& op = catalog.op(record.problem.op);
    const Problem layer = layer_of(op, record.problem);
    const auto place = places.emplace(layer, layers.size()).first->second;
    if (place == layers.size()) layers.push_back({layer, {}});
    for (const std::int64_t count : record.tokens) {
      const Problem problem = record.problem.with_size(std::string(op.token_size()), count);
      if (layers[place].second.insert(count).second) {
        steps += static_cast<std::size_t>(settings.seeds);
        weight += settings.seeds * estimated_seconds(op, problem, kind);
      }
      outcomes[problem] = {};
    }
  }
  ProgressBar progress(*settings.status, "check", steps, weight);
  const auto begun = Clock::now();
  for (const auto& [layer, tokens] : layers) {
    const double spent = std::chrono::duration<double>(Clock::now() - begun).count();
    if (settings.budget_seconds > 0 && spent > settings.budget_seconds) break;
    const Op& op = catalog.op(layer.op);
    progress.show(layer.text());
    const auto step = [&, &name = layer](const Problem& problem) {
      progress.step(estimated_seconds(op, problem, kind), name.text());
    };
    LayerCheck check(op, layer, tokens, catalog, backend, presets, settings.cancel, outcomes);
    if (!check.run(settings, step) || settings.cancel->load()) break;
  }
  settings.status->clear();
  return outcomes;
}

}  // namespace fftune::tool
