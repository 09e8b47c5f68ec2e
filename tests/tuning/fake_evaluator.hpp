// An evaluator with a made-up landscape, noise from a generator that the test seeds, and a clock
// that the evaluator itself moves.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tuning/evaluate/evaluator.hpp"
#include "tuning/tuner.hpp"

namespace fftune {

enum class Misbehaviour { compile, spill, spill_little, wrong, launch, fault, killed, lose_device };

class FakeEvaluator : public Evaluator {
 public:
  using Truth = std::function<double(const Variant&)>;  // µs

  explicit FakeEvaluator(Truth truth, double noise = 0, std::uint64_t seed = 1)
      : truth_(std::move(truth)), noise_(noise), random_(seed) {
    facts_.name = "Fake Device";
    facts_.driver = "1";
  }

  const DeviceFacts& facts() const override { return facts_; }
  Limits limits(DType) override { return ceilings; }
  void set_cache(std::size_t bytes) { facts_.l2_bytes = bytes; }
  void set_kind(DeviceKind kind) { facts_.kind = kind; }
  Setup begin(const Problem& problem) override {
    clock += begin_seconds;
    ++begun[problem.text()];
    return {2, 1000, refusal};
  }

  std::vector<Compiled> compile(const Candidates& candidates, const CompileSink& sink) override {
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

  Verified verify(const Candidate& candidate) override {
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

  std::vector<Timing> time(const Candidates& candidates, const TimeRequest& request) override {
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

  std::vector<std::string> disturbances() override {
    return disturbed ? disturbed(clock) : std::vector<std::string>{};
  }

  std::string lost() const override { return lost_; }

  /// Options whose clock is this evaluator's.
  TuneOptions options(double budget_seconds, const std::string& strategy = TuneOptions().strategy) {
    TuneOptions options = this->options();
    options.budget_seconds = budget_seconds;
    options.strategy = strategy;
    return options;
  }
  TuneOptions options() {
    TuneOptions options;
    options.now = [this] { return clock; };
    options.sleep = [this](double seconds) { clock += seconds; };
    // One burst, as on a GPU: what a test counts is then what it asks for.
    options.bursts = [](DeviceKind, double) { return BurstPlan{}; };
    return options;
  }

  double clock = 0;
  Limits ceilings{1e9, 1e12};
  double begin_seconds = 0.01;
  double compile_seconds = 0.001;
  double restart_seconds = 1;  // of a process that was killed
  std::string refusal;
  std::map<std::string, Misbehaviour> misbehaving;  // by id
  std::function<int(const std::string&)> registers;
  std::function<std::string(const std::string&)> bits;  // by id
  std::function<double(const std::string&)> stretch;    // of the next sample of an id
  std::function<std::vector<std::string>(double clock)> disturbed;
  std::function<double(const Recipe&)> whole_us;  // of several variants; the sum if empty
  std::map<std::string, int> begun, compiled, verified, sampled;
  std::atomic<bool>* cancel = nullptr;
  int cancel_after = 0;  // samples
  int verified_after_cancel = 0;

 private:
  bool behaves(const std::string& id, Misbehaviour kind) const {
    const auto found = misbehaving.find(id);
    return found != misbehaving.end() && found->second == kind;
  }

  double sample(const Candidate& candidate) {
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

  DeviceFacts facts_;
  Truth truth_;
  double noise_;
  std::mt19937_64 random_;
  std::string lost_;
};

}  // namespace fftune
