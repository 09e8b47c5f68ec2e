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

  explicit FakeEvaluator(Truth truth, double noise = 0, std::uint64_t seed = 1);

  const DeviceFacts& facts() const override { return facts_; }
  Limits limits(DType) override { return ceilings; }
  void set_cache(std::size_t bytes) { facts_.l2_bytes = bytes; }
  void lack(const std::string& what) { facts_.toolkit = what; }
  void set_kind(DeviceKind kind) { facts_.kind = kind; }
  Setup begin(const Problem& problem) override;

  std::vector<Compiled> compile(const Candidates& candidates, const CompileSink& sink) override;

  Verified verify(const Candidate& candidate) override;

  std::vector<Timing> time(const Candidates& candidates, const TimeRequest& request) override;

  std::vector<std::string> disturbances() override;

  std::string lost() const override { return lost_; }

  /// Options whose clock is this evaluator's.
  TuneOptions options(double budget_seconds, const std::string& strategy = TuneOptions().strategy);
  TuneOptions options();

  double clock = 0;
  Limits ceilings{1e9, 1e12};
  double begin_seconds = 0.01;
  double compile_seconds = 0.001;
  double restart_seconds = 1;  // of a process that was killed
  std::string refusal, left_out;
  bool for_now = false;
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
  bool behaves(const std::string& id, Misbehaviour kind) const;

  double sample(const Candidate& candidate);

  DeviceFacts facts_;
  Truth truth_;
  double noise_;
  std::mt19937_64 random_;
  std::string lost_;
};

}  // namespace fftune
