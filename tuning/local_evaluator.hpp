// The evaluator of a device that this process has opened.
#pragma once

#include <cstdint>
#include <memory>

#include "registry/catalog.hpp"
#include "tuning/evaluator.hpp"

namespace fftune {

class LocalEvaluator : public Evaluator {
 public:
  /// Both must outlive it. `seed` draws the data that is multiplied.
  LocalEvaluator(Backend& backend, const Catalog& catalog, std::uint64_t seed);
  ~LocalEvaluator() override;

  const DeviceFacts& facts() const override;
  Limits limits(DType dtype) override;
  Setup begin(const Problem& problem) override;
  std::vector<Compiled> compile(const std::vector<Candidate>& candidates,
                                const CompileSink& sink) override;
  Verified verify(const Candidate& candidate) override;
  std::vector<Timing> time(const std::vector<Candidate>& candidates,
                           const TimeRequest& request) override;
  std::string lost() const override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fftune
