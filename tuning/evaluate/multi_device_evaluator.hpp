// The evaluator of several devices of one kind: candidates are screened on all of them in parallel;
// close comparisons are timed on the first device, the reference. A sentinel, one candidate that
// works, is timed by every device before and after every few candidates. The times of a device that
// is slower than the reference are divided by its slowdown; times taken while its speed changed are
// taken again; and the candidates of a lost device go to the others.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tuning/evaluate/evaluator.hpp"
#include "tuning/evaluate/worker_thread.hpp"

namespace fftune {

class MultiDeviceEvaluator : public Evaluator {
 public:
  struct Device {
    std::string name;  // "cuda:1", for people
    std::function<std::unique_ptr<Evaluator>()> open;
  };

  /// Opens all at once. One that does not open is left out, and remarks() says so. Throws what the
  /// first threw if none opens, and Error(invalid_input) if they are not of one kind.
  explicit MultiDeviceEvaluator(std::vector<Device> devices);
  ~MultiDeviceEvaluator() override;

  const DeviceFacts& facts() const override { return facts_; }
  Limits limits(DType dtype) override;
  Setup begin(const Problem& problem) override;
  std::vector<Compiled> compile(const Candidates& candidates, const CompileSink& sink) override;
  Verified verify(const Candidate& candidate) override;
  std::vector<Timing> time(const Candidates& candidates, const TimeRequest& request) override;
  /// Disturbances of the reference, because decisions rest on its times.
  std::vector<std::string> disturbances() override;
  std::size_t workers() const override { return live().size(); }
  void try_each(const Candidates& candidates, const TrialCalls& calls) override;
  std::vector<std::string> remarks() override;
  void avoid(std::set<std::string> ids) override;
  std::string lost() const override;

 private:
  struct Member;
  struct Trials;

  /// Those that can work on the problem, the first being the reference.
  std::vector<Member*> live() const;
  Member& first_opened();
  /// Runs `work` on the reference, and on the next one if the reference is lost in it.
  void on_reference(const std::function<void(Evaluator&)>& work);
  /// On all that are live, each in its own thread; rethrows the first that was thrown.
  void on_all(const std::function<void(Member&)>& work);
  void retire_if_lost(Member& member);
  /// From the problem at hand.
  void leave_out(Member& member, const std::string& why);
  void remark(const std::string& text);
  void find_sentinel(Trials& trials);
  std::optional<double> time_sentinel(Member& member);
  /// Tries the remaining candidates until none is left.
  void try_on(Member& member, Trials& trials);

  DeviceFacts facts_;
  std::vector<std::unique_ptr<Member>> members_;
  mutable std::mutex mutex_;  // guards remarks_ and what members say of themselves
  std::vector<std::string> remarks_;
  std::string last_loss_;
  std::optional<Candidate> sentinel_;
  double sentinel_us_ = 0;  // on the reference, when it was first timed
  std::string reference_;   // the name of that device
};

}  // namespace fftune
