#include "tuning/fake_evaluator.hpp"

namespace fftune {

FakeEvaluator::FakeEvaluator(Truth truth, double noise, std::uint64_t seed)
    : truth_(std::move(truth)), noise_(noise), random_(seed) {
  facts_.name = "Fake Device";
  facts_.driver = "1";
}

Setup FakeEvaluator::begin(const Problem& problem) {
  clock += begin_seconds;
  ++begun[problem.text()];
  return {2, 1000, refusal, left_out, for_now};
}

std::vector<Compiled> FakeEvaluator::compile(const Candidates& candidates,
                                             const CompileSink& sink) {
  std::vector<Compiled> all(candidates.size());
  bool go_on = true;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (!go_on) {
      all[i].failure = "not started";
      continue;
    }
    const auto id = candidates[i].id();
    clock += compile_seconds;
    ++compiled[id];
    all[i].registers = registers ? registers(id) : 32;
    if (behaves(id, Misbehaviour::compile)) all[i].failure = "no such instruction";
    if (behaves(id, Misbehaviour::spill)) all[i].spill_bytes = 68;
    if (behaves(id, Misbehaviour::spill_little)) all[i].spill_bytes = 40;
    go_on = sink(i, all[i]);
  }
  return all;
}

Verified FakeEvaluator::verify(const Candidate& candidate) {
  const auto id = candidate.id();
  clock += 0.002;
  ++verified[id];
  if (cancel && *cancel) ++verified_after_cancel;
  if (behaves(id, Misbehaviour::wrong)) return {false, 0.5, 1e-3, false, "wrong by 0.5"};
  if (behaves(id, Misbehaviour::fault)) return {false, 0, 1e-3, true, "illegal address"};
  if (behaves(id, Misbehaviour::killed)) {
    clock += restart_seconds;
    Verified killed{false, 0, 1e-3, false, "killed by SIGKILL"};
    killed.fatal = killed.killed = true;
    return killed;
  }
  if (behaves(id, Misbehaviour::lose_device)) {
    lost_ = "illegal address";
    return {false, 0, 1e-3, true, "illegal address"};
  }
  Verified passed{true, 1e-4, 1e-3, false, ""};
  passed.bits = bits ? bits(id) : "00000000000000aa";
  return passed;
}

std::vector<Timing> FakeEvaluator::time(const Candidates& candidates, const TimeRequest& request) {
  const double began = clock;
  std::vector<Timing> all(candidates.size());
  for (int round = 0; round < request.samples; ++round) {
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      const auto id = candidates[i].id();
      if (behaves(id, Misbehaviour::launch)) all[i].failure = "too many resources requested";
      if (!all[i].failure.empty() || all[i].abandoned) continue;
      const double us = sample(candidates[i]);
      clock += std::max(us, 200.0) * 1e-6;
      ++sampled[id];
      all[i].samples_us.push_back(us);
      all[i].abandoned = is_hopeless(all[i].samples_us, request.abandon_above_us);
      if (cancel && cancel_after > 0 && --cancel_after == 0) *cancel = true;
    }
    const bool doubt = std::any_of(all.begin(), all.end(), [&](const Timing& timing) {
      return is_doubtful(timing.samples_us, request.abandon_above_us);
    });
    if (clock - began >= request.seconds && !doubt) break;
  }
  return all;
}

std::vector<std::string> FakeEvaluator::disturbances() {
  return disturbed ? disturbed(clock) : std::vector<std::string>{};
}

TuneOptions FakeEvaluator::options(double budget_seconds, const std::string& strategy) {
  TuneOptions options = this->options();
  options.budget_seconds = budget_seconds;
  options.strategy = strategy;
  return options;
}

TuneOptions FakeEvaluator::options() {
  TuneOptions options;
  options.now = [this] { return clock; };
  options.sleep = [this](double seconds) { clock += seconds; };
  // One burst, as on a GPU: what a test counts is then what it asks for.
  options.bursts = [](DeviceKind, double) { return BurstPlan{}; };
  return options;
}

bool FakeEvaluator::behaves(const std::string& id, Misbehaviour kind) const {
  const auto found = misbehaving.find(id);
  return found != misbehaving.end() && found->second == kind;
}

double FakeEvaluator::sample(const Candidate& candidate) {
  double us = 0;
  if (!candidate.baseline.empty())
    us = 1000;
  else if (candidate.recipe.size() > 1 && whole_us)
    us = whole_us(candidate.recipe);
  else
    for (const auto& variant : candidate.recipe) us += truth_(variant);
  std::normal_distribution<double> normal;
  if (stretch) us *= stretch(candidate.id());
  return us * (1 + noise_ * std::abs(normal(random_)));
}

}  // namespace fftune
