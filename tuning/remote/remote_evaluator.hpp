// The evaluator of a device of another host. The rank there supervises a worker of its own and
// answers calls over a remote channel, in the protocol of a worker (tuning/worker/serve.hpp).
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "store/json.hpp"
#include "tuning/evaluate/evaluator.hpp"
#include "tuning/protocol/line_channel.hpp"

namespace fftune {

class RemoteEvaluator : public Evaluator {
 public:
  /// Waits for the device to be opened there; throws its errors. `name`: of the rank and the
  /// device, for people.
  RemoteEvaluator(std::unique_ptr<LineChannel> channel, std::string name);

  const DeviceFacts& facts() const override { return facts_; }
  Limits limits(DType dtype) override;
  Setup begin(const Problem& problem) override;
  void avoid(std::set<std::string> ids) override { avoided_ = std::move(ids); }
  std::vector<Compiled> compile(const Candidates& candidates, const CompileSink& sink) override;
  Verified verify(const Candidate& candidate) override;
  std::vector<Timing> time(const Candidates& candidates, const TimeRequest& request) override;
  std::vector<std::string> disturbances() override;
  std::string lost() const override { return lost_; }

 private:
  using Take = std::function<void(const JsonValue&)>;

  /// False if nobody answers any more: lost() says why. Throws Error if the answer is one.
  bool ask(const JsonValue& call, const Take& take, const Take& listen = {});
  bool await(const Take& take, const Take& listen);

  std::unique_ptr<LineChannel> channel_;
  std::string name_;
  DeviceFacts facts_;
  std::set<std::string> avoided_;
  std::string lost_;
};

/// Opens a device and answers for it until the channel is closed: the other end of the above. The
/// thread that calls it is the one that the device's worker lives with.
/// Throws Error for a message that is none.
void serve_remote(LineChannel& channel, const std::function<std::unique_ptr<Evaluator>()>& open);

/// The same for several devices, `open(i)` for channel i, each on a thread of its own. One that
/// throws closes its channel; the first exception is rethrown when all have ended.
void serve_remotes(std::vector<std::unique_ptr<LineChannel>> channels,
                   const std::function<std::unique_ptr<Evaluator>(std::size_t)>& open);

}  // namespace fftune
